#include <CLI/CLI.hpp>
#include <cstdio>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <tuple>

#include "cli/check.h"
#include "cli/command.h"
#include "cli/machine.h"
#include "cli/ranks.h"
#include "cli/report.h"
#include "cli/verify_ranks.h"
#include "core/check.h"
#include "treeline/comm.h"
#include "treeline/thread_pool.h"

namespace treeline::cli {
namespace {

struct VerifyOptions {
  std::uint64_t cases = 500;
  std::uint64_t seed = 1;
  int threads = 1;
  std::vector<int> ranks;  // empty: kernels alone
  RankOptions where;
  std::string json;
};

// The worst error of one kernel on one instruction set, and the case that gave it.
struct Worst {
  double error = -1.0;
  std::uint64_t cases = 0;
  std::uint64_t index = 0;
};

void RunVerify(const VerifyOptions& options) {
  // Every attainable instruction set, unless the environment asks for one.
  std::vector<Isa> isas = AttainableIsas();
  if (std::getenv("TREELINE_ISA") != nullptr) isas = {DefaultIsa()};
  ThreadPool pool(options.threads);
  std::map<std::tuple<Isa, std::size_t, Arithmetic>, Worst> worst;
  {
    Progress progress("verify", options.cases);
    for (std::uint64_t i = 0; i < options.cases; ++i) {
      const RandomCase random = MakeRandomCase(options.seed, i);
      Checker checker(random.shape, random.layout, random.ranks);
      for (Isa isa : isas) {
        const Errors errors = checker.Run({.pool = &pool, .isa = isa});
        for (std::size_t k = 0; k < kKernels; ++k) {
          if (errors[k] < 0.0) continue;
          Worst& w = worst[{isa, k,
                            ArithmeticOf(static_cast<Kernel>(k), isa, random.shape.spec,
                                         random.shape.q_dtype, random.shape.kv_dtype)}];
          ++w.cases;
          if (errors[k] > w.error) {
            w.error = errors[k];
            w.index = i;
          }
        }
      }
      progress.Set(i + 1);
    }
  }

  const bool print = options.json != "-" && IsFirst();
  if (print)
    std::printf("%-11s %-9s %-7s %7s  %-11s %-9s\n", "isa", "kernel", "in", "cases", "max error",
                "bound");
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  const Worst* failed = nullptr;
  std::string failed_name;
  for (const auto& [key, w] : worst) {
    const auto [with, index, arithmetic] = key;
    const auto kernel = static_cast<Kernel>(index);
    const std::string isa(Name(with));
    const std::string name(Name(kernel));
    const std::string in(Name(arithmetic));
    const double bound = Bound(kernel, arithmetic);
    const bool ok = w.error <= bound;
    if (print) {
      std::printf("%-11s %-9s %-7s %7llu  %-11.2e %-9.0e %s\n", isa.c_str(), name.c_str(),
                  in.c_str(), static_cast<unsigned long long>(w.cases), w.error, bound,
                  ok ? "ok" : "FAILED");
    }
    rows.push_back({{"isa", isa},
                    {"case", name},
                    {"arithmetic", in},
                    {"cases", w.cases},
                    {"max_error", w.error},
                    {"bound", bound},
                    {"verified", ok}});
    if (!ok && failed == nullptr) {
      failed = &w;
      failed_name = name;
      failed_name.append(" on ").append(isa);
    }
  }
  WriteJson(options.json, {{"machine", ToJson(DescribeMachine(), isas.back())},
                           {"seed", options.seed},
                           {"cases", options.cases},
                           {"rows", rows}});
  if (failed != nullptr) {
    Throw<CheckFailure>(failed_name, " has an error of ", failed->error, " in case ", failed->index,
                        " of seed ", options.seed, ": ",
                        MakeRandomCase(options.seed, failed->index).shape.Describe());
  }
  if (print) {
    std::printf("%llu random cases match the float64 oracle\n",
                static_cast<unsigned long long>(options.cases));
  }
}

}  // namespace

void AddVerify(CLI::App& program) {
  CLI::App* command = program.add_subcommand(
      "verify",
      "Compare every kernel, or every schedule over ranks, with a float64 oracle on random shapes");
  command->footer(
      "With --ranks: every schedule and layout, forward and backward, over so many ranks; the "
      "result "
      "must also be\nbitwise the same on all ranks. Otherwise kernels: on every instruction set of "
      "this CPU, or on the one that TREELINE_ISA names. Cases "
      "depend only\non --seed, so a failure can be repeated. The error of a tensor is max|a - b| / "
      "max(1, max|b|); see\ndocs/numerics.md. Exit code 1 if an error is beyond its bound.\n\n"
      "Examples:\n  treeline verify --cases 2000 --seed 7\n"
      "  treeline verify --ranks 1,2,3,5,8 --cases 20");
  auto options = std::make_shared<VerifyOptions>();
  command->add_option("--cases", options->cases, "Random cases")
      ->check(CLI::Range(std::uint64_t{1}, std::uint64_t{1'000'000'000}))
      ->capture_default_str()
      ->type_name("N");
  command->add_option("--seed", options->seed, "Seed of the cases")
      ->capture_default_str()
      ->type_name("N");
  command->add_option("--ranks", options->ranks, "Numbers of ranks to check schedules over")
      ->delimiter(',')
      ->check(CLI::Range(1, ThreadGroup::kMaxRanks))
      ->type_name("LIST");
  AddRankOptions(*command, options->where);
  CLI::Option* threads = AddThreadsOption(*command, options->threads);
  AddJsonOption(*command, options->json);
  command->callback([options, threads] {
    const int rank_threads = threads->count() > 0 ? options->threads : 1;
    const std::vector<int> ranks = JoinRanks(options->where, options->ranks, {}, rank_threads);
    if (ranks.empty()) return RunVerify(*options);
    VerifyRanks({.ranks = ranks,
                 .cases = options->cases,
                 .seed = options->seed,
                 .threads = rank_threads,
                 .timeout = options->where.milliseconds(),
                 .json = options->json});
  });
}

}  // namespace treeline::cli
