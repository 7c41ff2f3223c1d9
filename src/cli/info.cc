#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "cli/command.h"
#include "cli/limits.h"
#include "cli/links.h"
#include "cli/machine.h"
#include "cli/problem.h"
#include "cli/ranks.h"
#include "cli/report.h"
#include "treeline/cost.h"
#include "treeline/errors.h"
#include "treeline/thread_pool.h"

namespace treeline::cli {
namespace {

struct InfoOptions {
  int threads = 1;
  bool comm = false;
  RankOptions where;
  std::vector<int> ranks;
  std::string json;
};

std::string Size(std::size_t bytes) {
  char text[32];
  if (bytes >= (std::size_t{1} << 20)) {
    std::snprintf(text, sizeof(text), "%zu MiB", bytes >> 20);
  } else {
    std::snprintf(text, sizeof(text), "%zu KiB", bytes >> 10);
  }
  return text;
}

// The ranks and what their links cost, as rank 0 knows it.
nlohmann::ordered_json DescribeRanks(const InfoOptions& options) {
  const std::vector<int> ranks = JoinRanks(options.where, options.ranks, {2}, 1);
  if (ranks.size() != 1) throw ArgumentError("info takes one number of --ranks");
  nlohmann::ordered_json json;
  RunOverRanks({.ranks = ranks[0], .timeout = options.where.milliseconds()},
               [&](Communicator& comm) {
                 CpuBackend backend;
                 CostModel model;
                 const double seconds = TimeOnce([&] { model = MeasureCost(comm, backend, 0); });
                 if (comm.rank() != 0) return;
                 json = LinksToJson(model);
                 json["ranks"] = comm.size();
                 json["kind"] = Processes() == nullptr ? "threads" : "processes";
                 json["hosts"] = comm.hosts();
                 json["measured_in_seconds"] = seconds;
               });
  return json;
}

void PrintRanks(const nlohmann::ordered_json& comm) {
  const int ranks = comm["ranks"];
  const auto& numbers = comm["hosts"];
  const int hosts = 1 + std::ranges::max_element(numbers)->get<int>();
  std::printf("ranks             %d %s on %d host%s\n", ranks,
              comm["kind"].get<std::string>().c_str(), hosts, hosts == 1 ? "" : "s");
  const auto show = [&](const char* what, const char* level) {
    std::printf("%-17s latency %.1f us, %.3f GB/s\n", what, comm[level]["latency_us"].get<double>(),
                comm[level]["gbps"].get<double>());
  };
  if (hosts < ranks) show("within a host", "within");
  if (hosts > 1) show("between hosts", "between");
  std::printf("%-17s %.3f s\n", "measured in", comm["measured_in_seconds"].get<double>());
}

void RunInfo(const InfoOptions& options) {
  nlohmann::ordered_json comm;
  if (options.comm) comm = DescribeRanks(options);
  LeaveRanks();
  if (!IsFirst()) return;  // the others would only disturb what is measured
  const Machine machine = DescribeMachine();
  ThreadPool pool(options.threads);
  const Context context{.pool = &pool, .isa = DefaultIsa()};
  const Limits limits = MeasureLimits(context);
  if (options.json != "-") {
    std::string isas;
    for (Isa isa : machine.isas) isas.append(isas.empty() ? "" : ", ").append(Name(isa));
    std::printf("treeline          %s (%s, %s)\n", machine.version.c_str(), machine.commit.c_str(),
                machine.compiler.c_str());
    std::printf("CPU               %s\n", machine.cpu.c_str());
    std::printf("cores             %d\n", machine.cores);
    for (const Cache& cache : machine.caches) {
      std::printf("L%d cache          %d x %s\n", cache.level, cache.count,
                  Size(cache.bytes).c_str());
    }
    std::printf("instruction sets  %s; in use: %s\n", isas.c_str(),
                std::string(Name(*context.isa)).c_str());
    std::printf("read bandwidth    %.1f GB/s (%d threads, 4 streams each, 512 MiB)\n",
                limits.read_gbps, options.threads);
    std::printf("FMA peak          %.1f GFLOP/s (%d threads, f32)\n", limits.fma_gflops,
                options.threads);
    if (limits.bf16_gflops > 0.0) {
      std::printf("bf16 peak         %.1f GFLOP/s (%d threads)\n", limits.bf16_gflops,
                  options.threads);
    }
    if (options.comm) PrintRanks(comm);
  }
  nlohmann::ordered_json json{{"machine", ToJson(machine, *context.isa)},
                              {"limits", ToJson(limits)}};
  if (options.comm) json["comm"] = comm;
  WriteJson(options.json, json);
}

}  // namespace

void AddInfo(CLI::App& program) {
  CLI::App* command = program.add_subcommand(
      "info", "Show the CPU, its caches and instruction sets, and measure its limits");
  command->footer(
      "Bandwidth and peak are measured now, with the instruction set in use: the best one, or what "
      "TREELINE_ISA names.");
  auto options = std::make_shared<InfoOptions>();
  AddThreadsOption(*command, options->threads);
  AddJsonOption(*command, options->json);
  CLI::Option* comm =
      command
          ->add_option("--comm", options->where.comm,
                       "Also show the ranks, their hosts, and what links cost: threads, or the "
                       "processes that mpirun has started (threads or mpi)")
          ->expected(0, 1)
          ->check([](const std::string& given) {
            const bool good = given == "threads" || given == "mpi" || given == "{}";  // "{}": alone
            return good ? "" : given + " not in {threads,mpi}";
          })
          ->type_name("WHAT");
  command->add_option("--ranks", options->ranks, "Number of ranks (default: 2, or mpirun's)")
      ->check(CLI::Range(1, ThreadGroup::kMaxRanks))
      ->type_name("N");
  AddTimeoutOption(*command, options->where);
  command->callback([options, comm] {
    options->comm = comm->count() > 0;
    if (options->where.comm == "{}") options->where.comm.clear();
    RunInfo(*options);
  });
}

}  // namespace treeline::cli
