#include "cli/bench_ranks.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/deal.h"
#include "cli/limits.h"
#include "cli/measure_ranks.h"
#include "cli/ranks.h"
#include "cli/report.h"
#include "core/check.h"
#include "schedule/collectives/collectives.h"
#include "treeline/thread_pool.h"

namespace treeline::cli {
namespace {

struct Options {
  RankWork work = RankWork::kDecode;
  std::vector<std::string> schedules;  // empty: all that there are
  std::vector<std::string> layouts;
  std::vector<int> ranks;
  int threads = 1;
  std::vector<std::int64_t> contexts;
  std::vector<std::string> dtypes;
  int heads = 0;
  int kv_heads = 0;
  int head_dim = 128;
  int batch = 1;
  int node_size = 0;
  int repeats = 7;
  RankOptions where;
  std::uint64_t seed = 1;
  bool reproducible = false;
  bool explain = false;
  bool overlap = false;
  std::string links;
  std::string json;
};

// One device with as many threads.
RankCase Baseline(RankCase c) {
  c.baseline = true;
  c.schedule = c.work == RankWork::kDecode ? Schedule::kTree : Schedule::kRingKv;
  c.layout = LayoutKind::kContiguous;
  c.threads *= c.ranks;
  c.ranks = 1;
  c.node_size = 0;
  c.reproducible = false;
  return c;
}

std::vector<RankCase> MakeCases(const Options& options) {
  std::vector<RankCase> cases;
  for (const std::int64_t context : options.contexts) {
    for (const std::string& dtype : options.dtypes) {
      for (const int ranks : options.ranks) {
        RankCase c{.work = options.work,
                   .ranks = ranks,
                   .threads = options.threads,
                   .context = context,
                   .heads = options.heads,
                   .kv_heads = options.kv_heads,
                   .head_dim = options.head_dim,
                   .dtype = ParseDType(dtype),
                   .batch = options.batch,
                   .node_size = options.node_size,
                   .reproducible = options.reproducible};
        Require(c.dtype != DType::kQ8_0 || c.work != RankWork::kTrain,
                "train has no q8_0 kernel; it takes f32, bf16 and f16");
        if (Processes() == nullptr) cases.push_back(Baseline(c));
        for (const std::string& layout : options.layouts) {
          c.layout = ParseLayout(layout);
          for (const std::string& schedule : options.schedules) {
            c.schedule = ParseSchedule(schedule);
            cases.push_back(c);
          }
        }
        if (options.work != RankWork::kDecode) continue;
        if (Processes() != nullptr) {
          c.work = RankWork::kMpiSum;
          cases.push_back(c);
        }
        c.work = RankWork::kMerge;
        for (const std::string& schedule : options.schedules) {
          c.schedule = ParseSchedule(schedule);
          if (c.schedule != Schedule::kRingKv && c.schedule != Schedule::kAuto) cases.push_back(c);
        }
      }
    }
  }
  return cases;
}

bool HasSchedule(const RankCase& c) { return !c.baseline && c.work != RankWork::kMpiSum; }

nlohmann::ordered_json ToJson(const RankCase& c, const RankMeasurement& m) {
  const double median = Median(m.seconds);
  const bool merge = c.work == RankWork::kMerge || c.work == RankWork::kMpiSum;
  nlohmann::ordered_json row{
      {"case", Name(c.work)},
      {"schedule", HasSchedule(c) ? Name(m.schedule) : nlohmann::ordered_json()},
      {"layout", c.baseline || merge ? nlohmann::ordered_json() : Name(c.layout)},
      {"ranks", c.ranks},
      {"threads", c.threads},
      {"context", merge ? nlohmann::ordered_json() : nlohmann::ordered_json(c.context)},
      {"batch", c.batch},
      {"heads", c.heads},
      {"kv_heads", c.kv_heads},
      {"head_dim", c.head_dim},
      {"dtype", merge ? nlohmann::ordered_json() : Name(c.dtype)},
      {"isa", Name(DefaultIsa())},
      {"reproducible", c.reproducible},
      {"median_us", median * 1e6},
      {"min_us", *std::min_element(m.seconds.begin(), m.seconds.end()) * 1e6},
      {"max_us", *std::max_element(m.seconds.begin(), m.seconds.end()) * 1e6},
      {"limit_fraction", m.fractions.empty() ? nlohmann::ordered_json()
                                             : nlohmann::ordered_json(Median(m.fractions))},
      {"bytes_sent_per_rank", m.bytes},
      {"messages_per_rank", m.messages},
      {"rounds", m.rounds},
      {"peak_bytes_per_rank", m.peak_bytes},
      {"balance", merge ? nlohmann::ordered_json() : nlohmann::ordered_json(m.balance)},
      {"reproducible_cost",
       m.costs.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(Median(m.costs))},
      {"max_error", m.max_error},
      {"verified", m.max_error <= m.bound}};
  if (m.overlap) {
    row["serial_us"] = m.overlap->serial * 1e6;
    row["network_us"] = m.overlap->network * 1e6;
    row["hidden"] = m.overlap->hidden;
  }
  for (const PredictedCost& cost : m.predicted) {
    if (cost.schedule == m.schedule) row["predicted_us"] = cost.seconds() * 1e6;
  }
  return row;
}

void PrintHeader() {
  std::printf("%-8s %-10s %-10s %5s %7s %8s %12s %6s %12s %8s %6s %10s %9s\n", "case", "schedule",
              "layout", "ranks", "threads", "context", "median", "limit", "bytes", "messages",
              "rounds", "peak MB", "error");
}

// In a unit that leaves a few digits.
std::string FormatTime(double seconds) {
  char text[32];
  if (seconds < 0.01) {
    std::snprintf(text, sizeof(text), "%.1f us", seconds * 1e6);
  } else if (seconds < 10.0) {
    std::snprintf(text, sizeof(text), "%.1f ms", seconds * 1e3);
  } else {
    std::snprintf(text, sizeof(text), "%.1f s", seconds);
  }
  return text;
}

void PrintRow(const RankCase& c, const RankMeasurement& m) {
  const bool merge = c.work == RankWork::kMerge || c.work == RankWork::kMpiSum;
  char limit[16] = "-";
  if (!m.fractions.empty()) std::snprintf(limit, sizeof(limit), "%.2f", Median(m.fractions));
  char context[24] = "-";
  if (!merge) std::snprintf(context, sizeof(context), "%lld", static_cast<long long>(c.context));
  char cost[48] = "";
  if (!m.costs.empty()) std::snprintf(cost, sizeof(cost), ", %.2fx normal", Median(m.costs));
  std::printf("%-8s %-10s %-10s %5d %7d %8s %12s %6s %12lld %8lld %6lld %10.1f %9.1e  %s%s\n",
              std::string(Name(c.work)).c_str(),
              HasSchedule(c) ? std::string(Name(m.schedule)).c_str()
              : c.baseline   ? "one device"
                             : "-",
              c.baseline || merge ? "-" : std::string(Name(c.layout)).c_str(), c.ranks, c.threads,
              context, FormatTime(Median(m.seconds)).c_str(), limit,
              static_cast<long long>(m.bytes), static_cast<long long>(m.messages),
              static_cast<long long>(m.rounds), static_cast<double>(m.peak_bytes) / 1e6,
              m.max_error, m.max_error <= m.bound ? "ok" : "WRONG", cost);
  std::fflush(stdout);
}

void PrintOverlap(const Overlap& overlap) {
  std::printf(
      "  without overlap %s, of which messages %s: overlap hides %.2f of the shorter part\n",
      FormatTime(overlap.serial).c_str(), FormatTime(overlap.network).c_str(), overlap.hidden);
  std::fflush(stdout);
}

void PrintPrediction(const RankMeasurement& m) {
  std::printf("  predicted %-10s %12s %12s %12s %12s %14s %6s\n", "", "total us", "attend us",
              "merge us", "network us", "bytes", "rounds");
  for (const PredictedCost& cost : m.predicted) {
    std::printf("            %-10s %12.1f %12.1f %12.1f %12.1f %14lld %6lld\n",
                std::string(Name(cost.schedule)).c_str(), cost.seconds() * 1e6, cost.attend * 1e6,
                cost.merge * 1e6, cost.network * 1e6, static_cast<long long>(cost.bytes),
                static_cast<long long>(cost.rounds));
  }
}

void Run(Options options) {
  options.ranks = JoinRanks(options.where, options.ranks, {2}, options.threads);
  std::optional<Links> links;  // rank 0 predicts and chooses; other hosts may not have the file
  if (!options.links.empty() && IsFirst()) links = ReadLinks(options.links);
  if (options.schedules.empty()) {
    for (const Schedule schedule : kDecodeSchedules) {
      const bool both = schedule == Schedule::kTree || schedule == Schedule::kGather;
      if (both || !options.reproducible) options.schedules.emplace_back(Name(schedule));
    }
  }
  Validate(AttentionSpec::Make(options.heads, options.kv_heads, options.head_dim));
  const Isa isa = DefaultIsa();
  if (options.dtypes.empty()) options.dtypes = {ComputesInBf16(isa) ? "bf16" : "f32"};
  const std::vector<RankCase> cases = MakeCases(options);
  Machine machine = DescribeMachine();
  machine.cores = HostCores();  // of which limits are
  const int most = *std::max_element(options.ranks.begin(), options.ranks.end());
  ThreadPool pool = HostPool(std::min(RanksHere(most) * options.threads, machine.cores));
  const Limits limits = MeasureLimitsAlone({.pool = &pool, .isa = isa}, [] {
    if (Communicator* comm = Processes()) Barrier(*comm);
  });
  const bool print = options.json != "-" && IsFirst();
  if (print) {
    std::printf("%s, %s: reads %.1f GB/s, multiplies and adds %.1f GFLOP/s\n", machine.cpu.c_str(),
                std::string(Name(isa)).c_str(), limits.read_gbps, limits.fma_gflops);
    PrintHeader();
    std::fflush(stdout);
  }
  const RankTiming timing{.repeats = options.repeats,
                          .timeout = options.where.milliseconds(),
                          .seed = options.seed,
                          .links = links,
                          .overlap = options.overlap};
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  const RankCase* wrong = nullptr;
  Progress progress("bench", print ? 0 : cases.size());
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const RankMeasurement m = MeasureRanks(cases[i], timing);
    if (!IsFirst()) continue;
    if (print) PrintRow(cases[i], m);
    if (print && m.overlap) PrintOverlap(*m.overlap);
    // Once for each shape: right after its first row over ranks.
    const bool first = cases[i].work == RankWork::kDecode && !cases[i].baseline &&
                       (i == 0 || cases[i - 1].baseline || cases[i - 1].work != cases[i].work);
    if (print && options.explain && first) PrintPrediction(m);
    if (!(m.max_error <= m.bound)) wrong = &cases[i];
    rows.push_back(ToJson(cases[i], m));
    progress.Set(i + 1);
  }
  WriteJson(options.json,
            {{"machine", ToJson(machine, isa)}, {"limits", ToJson(limits)}, {"rows", rows}});
  if (wrong != nullptr) {
    Throw<CheckFailure>(Name(wrong->work), " by ", Name(wrong->schedule),
                        " gave a wrong result; its row says how far it is off");
  }
}

// What the three commands share.
CLI::App* AddCommand(CLI::App& bench, const char* name, const char* what,
                     const std::shared_ptr<Options>& options) {
  CLI::App* command = bench.add_subcommand(name, what);
  command->add_option("--ranks", options->ranks, "Numbers of ranks (default: 2, or mpirun's)")
      ->delimiter(',')
      ->check(CLI::Range(1, ThreadGroup::kMaxRanks))
      ->type_name("LIST");
  command->add_option("--threads", options->threads, "Threads of each rank")
      ->check(CLI::Range(1, ThreadPool::kMaxThreads))
      ->capture_default_str()
      ->type_name("N");
  command->add_option("--context", options->contexts, "Tokens of a sequence")
      ->delimiter(',')
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 32))
      ->capture_default_str()
      ->type_name("LIST");
  command->add_option("--layout", options->layouts, "Where tokens live")
      ->delimiter(',')
      ->check(CLI::IsMember({"contiguous", "striped", "zigzag"}))
      ->capture_default_str()
      ->type_name("LIST");
  CLI::Option* dtype = command->add_option("--dtype", options->dtypes, "Types of K and V")
                           ->delimiter(',')
                           ->check(CLI::IsMember({"f32", "bf16", "f16", "q8_0"}))
                           ->type_name("LIST");
  if (options->dtypes.empty()) {
    dtype->description("Types of K and V (default: f32; bf16 where products are)");
  } else {
    dtype->capture_default_str();
  }
  command->add_option("--heads", options->heads, "Query heads")
      ->check(CLI::Range(1, 65536))
      ->capture_default_str()
      ->type_name("N");
  command->add_option("--kv-heads", options->kv_heads, "Key and value heads")
      ->check(CLI::Range(1, 65536))
      ->capture_default_str()
      ->type_name("N");
  command->add_option("--head-dim", options->head_dim, "Head dim")
      ->check(CLI::Range(8, AttentionSpec::kMaxHeadDim))
      ->capture_default_str()
      ->type_name("N");
  command->add_option("--batch", options->batch, "Sequences")
      ->check(CLI::Range(1, 65536))
      ->capture_default_str()
      ->type_name("N");
  command->add_option("--repeats", options->repeats, "Times each case is measured")
      ->check(CLI::Range(1, 10000))
      ->capture_default_str()
      ->type_name("N");
  AddRankOptions(*command, options->where);
  command->add_option("--seed", options->seed, "Seed of the inputs")
      ->capture_default_str()
      ->type_name("N");
  AddJsonOption(*command, options->json);
  command->callback([options] { Run(*options); });
  return command;
}

void AddRing(CLI::App& bench, RankWork work, const char* name, const char* what) {
  auto options = std::make_shared<Options>();
  options->work = work;
  options->schedules = {"ring-kv"};
  options->layouts = {"contiguous", "striped", "zigzag"};
  options->contexts = {16384};
  options->heads = 8;
  options->kv_heads = 8;
  options->repeats = 3;  // a step takes many seconds
  CLI::App* command = AddCommand(bench, name, what, options);
  if (work == RankWork::kPrefill) {
    command->add_option("--schedule", options->schedules, "What goes round")
        ->delimiter(',')
        ->check(CLI::IsMember({"ring-kv", "ring-q"}))
        ->capture_default_str()
        ->type_name("LIST");
  }
  command->add_flag("--overlap", options->overlap,
                    "Also run without overlap, and say how much of the messages' time it hides");
  command->footer(
      "The first row is one device with as many threads, unless ranks are processes. `limit` is "
      "the fraction of the machine's "
      "multiply-adds;\n`balance` in the JSON is the most query-key pairs of a rank over the mean. "
      "Results are checked against the\nfloat64 oracle. docs/bench.md derives every column.\n\n"
      "Example:\n  treeline bench train --ranks 2 --layout contiguous,striped --context 8192");
}

}  // namespace

void AddBenchDecode(CLI::App& bench) {
  auto options = std::make_shared<Options>();
  options->work = RankWork::kDecode;
  options->layouts = {"striped"};
  options->contexts = {65536};
  options->dtypes = {"bf16"};
  options->heads = 32;
  options->kv_heads = 8;
  CLI::App* command = AddCommand(bench, "decode", "Decoding over ranks, by each schedule", options);
  command
      ->add_option("--schedule", options->schedules,
                   "How ranks share the work (default: all but auto)")
      ->delimiter(',')
      ->check(CLI::IsMember(
          {"tree", "gather", "tree-3", "heads", "two-level", "ring-kv", "ring-q", "auto"}))
      ->type_name("LIST");
  command
      ->add_option("--node-size", options->node_size, "Ranks of a node (default: those of a host)")
      ->check(CLI::Range(1, ThreadGroup::kMaxRanks))
      ->type_name("N");
  command
      ->add_option("--links", options->links,
                   "What links cost, from a file that info --comm --json wrote (default: measured)")
      ->type_name("FILE");
  command->add_flag("--reproducible", options->reproducible,
                    "The same bits for every number of ranks, and what that costs; tree and gather "
                    "only");
  command->add_flag("--explain", options->explain,
                    "Print what the cost model predicts for every schedule");
  command->footer(
      "The first row is one device with as many threads, unless ranks are processes. Rows of case "
      "`merge` time the reduction "
      "of partials\nalone, without keys. `bytes`, `messages` and `rounds` are those of one step, "
      "of "
      "the rank with most.\nResults are checked against the float64 oracle. docs/bench.md derives "
      "every column.\n\n"
      "Examples:\n  treeline bench decode\n"
      "  treeline bench decode --ranks 2,4 --schedule tree,ring-kv,auto --explain\n"
      "  treeline bench decode --ranks 4 --schedule tree --reproducible --json -");
}

void AddBenchPrefill(CLI::App& bench) {
  AddRing(bench, RankWork::kPrefill, "prefill", "Causal attention over ranks, by layout");
}

void AddBenchTrain(CLI::App& bench) {
  AddRing(bench, RankWork::kTrain, "train", "The same with gradients");
}

}  // namespace treeline::cli
