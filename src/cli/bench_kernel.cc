#include "cli/bench_kernel.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/limits.h"
#include "cli/machine.h"
#include "cli/measure_kernel.h"
#include "cli/ranks.h"
#include "cli/report.h"
#include "core/check.h"
#include "treeline/thread_pool.h"

namespace treeline::cli {
namespace {

// Batches make the keys and values of a decode case at least 512 MB, so that no cache holds them.
const BenchCase kCases[] = {
    {Kernel::kDecode, DType::kBF16, Storage::kDense, 65536, 32, 8, 128, 2, "Llama-3.1-8B"},
    {Kernel::kDecode, DType::kBF16, Storage::kPaged, 65536, 32, 8, 128, 2, "Llama-3.1-8B"},
    {Kernel::kDecode, DType::kF16, Storage::kDense, 65536, 32, 8, 128, 2, "Llama-3.1-8B"},
    {Kernel::kDecode, DType::kF16, Storage::kPaged, 65536, 32, 8, 128, 2, "Llama-3.1-8B"},
    {Kernel::kDecode, DType::kF32, Storage::kDense, 65536, 32, 8, 128, 1, "Llama-3.1-8B"},
    {Kernel::kDecode, DType::kF32, Storage::kPaged, 65536, 32, 8, 128, 1, "Llama-3.1-8B"},
    {Kernel::kDecode, DType::kQ8_0, Storage::kDense, 65536, 32, 8, 128, 4, "Llama-3.1-8B"},
    {Kernel::kDecode, DType::kQ8_0, Storage::kPaged, 65536, 32, 8, 128, 4, "Llama-3.1-8B"},
    {Kernel::kDecode, DType::kQ8_0, Storage::kPaged, 65536, 32, 8, 128, 4,
     "Llama-3.1-8B, int8 queries", true},
    {Kernel::kDecode, DType::kBF16, Storage::kPaged, 8192, 9, 3, 64, 90, "SmolLM2, 90 layers"},
    {Kernel::kDecode, DType::kBF16, Storage::kPaged, 65536, 32, 8, 64, 4, ""},
    {Kernel::kDecode, DType::kBF16, Storage::kPaged, 65536, 32, 8, 80, 4, ""},
    {Kernel::kDecode, DType::kBF16, Storage::kPaged, 65536, 32, 8, 96, 3, ""},
    {Kernel::kDecode, DType::kBF16, Storage::kPaged, 65536, 32, 8, 192, 2, ""},
    {Kernel::kDecode, DType::kBF16, Storage::kPaged, 65536, 32, 8, 256, 1, ""},
    {Kernel::kForward, DType::kF32, Storage::kDense, 8192, 8, 8, 128, 1, "causal"},
    {Kernel::kForward, DType::kBF16, Storage::kDense, 8192, 8, 8, 128, 1, "causal"},
    {Kernel::kForward, DType::kQ8_0, Storage::kPaged, 8192, 8, 2, 128, 1, "causal"},
    {Kernel::kForward, DType::kF32, Storage::kDense, 4096, 8, 8, 64, 1, "causal"},
    {Kernel::kForward, DType::kF32, Storage::kDense, 4096, 8, 8, 80, 1, "causal"},
    {Kernel::kForward, DType::kF32, Storage::kDense, 4096, 8, 8, 96, 1, "causal"},
    {Kernel::kForward, DType::kF32, Storage::kDense, 4096, 8, 8, 192, 1, "causal"},
    {Kernel::kForward, DType::kF32, Storage::kDense, 4096, 8, 8, 256, 1, "causal"},
    {Kernel::kBackward, DType::kF32, Storage::kDense, 4096, 8, 8, 128, 1, "causal"},
    {Kernel::kBackward, DType::kBF16, Storage::kDense, 4096, 8, 8, 128, 1, "causal"},
    {Kernel::kBackward, DType::kF32, Storage::kDense, 4096, 8, 8, 64, 1, "causal"},
    {Kernel::kMerge, DType::kF32, Storage::kDense, 1, 32, 8, 128, 8, "in cache"},
    {Kernel::kMerge, DType::kF32, Storage::kDense, 16384, 32, 8, 128, 2, "from memory"},
};

// A short look: one case of each kind.
const BenchCase kQuickCases[] = {
    {Kernel::kDecode, DType::kBF16, Storage::kPaged, 65536, 32, 8, 128, 2, "Llama-3.1-8B"},
    {Kernel::kForward, DType::kF32, Storage::kDense, 2048, 8, 8, 128, 1, "causal"},
    {Kernel::kBackward, DType::kF32, Storage::kDense, 2048, 8, 8, 128, 1, "causal"},
    {Kernel::kMerge, DType::kF32, Storage::kDense, 1, 32, 8, 128, 8, "in cache"},
};

struct BenchOptions {
  std::vector<std::string> kernels;
  std::vector<std::string> dtypes;
  std::vector<std::int64_t> contexts;
  int heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
  int batch = 0;
  bool int8_queries = false;
  int threads = 1;
  int repeats = 7;
  bool quick = false;
  std::uint64_t seed = 1;
  std::string json;
};

bool IsBandwidthBound(Kernel kernel) {
  return kernel == Kernel::kDecode || kernel == Kernel::kMerge;
}

template <class T>
bool Selected(const std::vector<T>& wanted, const T& value) {
  return wanted.empty() || std::find(wanted.begin(), wanted.end(), value) != wanted.end();
}

// The cases that the options leave, with the shapes that they give.
std::vector<BenchCase> SelectCases(const BenchOptions& options) {
  const std::span<const BenchCase> all =
      options.quick ? std::span<const BenchCase>(kQuickCases) : std::span<const BenchCase>(kCases);
  const bool custom = options.heads > 0 || options.kv_heads > 0 || options.head_dim > 0 ||
                      !options.contexts.empty() || options.batch > 0 || options.int8_queries;
  std::vector<BenchCase> selected;
  for (const BenchCase& c : all) {
    if (!Selected(options.kernels, std::string(Name(c.kernel)))) continue;
    if (!custom) {
      if (Selected(options.dtypes, std::string(Name(c.dtype)))) selected.push_back(c);
      continue;
    }
    // A custom shape replaces the table's: the first case of each kernel is the pattern.
    if (std::any_of(selected.begin(), selected.end(),
                    [&](const BenchCase& s) { return s.kernel == c.kernel; })) {
      continue;
    }
    const auto contexts =
        options.contexts.empty() ? std::vector<std::int64_t>{c.context} : options.contexts;
    std::vector<std::string> dtypes = options.dtypes;
    if (dtypes.empty() || c.kernel == Kernel::kMerge) dtypes = {std::string(Name(c.dtype))};
    for (std::int64_t context : contexts) {
      for (const std::string& dtype : dtypes) {
        BenchCase custom_case = c;
        custom_case.note = "";
        custom_case.context = context;
        custom_case.dtype = ParseDType(dtype);
        if (options.heads > 0) custom_case.heads = options.heads;
        if (options.kv_heads > 0) custom_case.kv_heads = options.kv_heads;
        if (options.head_dim > 0) custom_case.head_dim = options.head_dim;
        if (options.batch > 0) custom_case.batch = options.batch;
        custom_case.int8_queries = options.int8_queries && c.kernel == Kernel::kDecode &&
                                   custom_case.dtype == DType::kQ8_0;
        if (custom_case.int8_queries) custom_case.note = "int8 queries";
        Validate(
            AttentionSpec::Make(custom_case.heads, custom_case.kv_heads, custom_case.head_dim));
        Require(custom_case.dtype != DType::kQ8_0 || c.kernel != Kernel::kBackward,
                "backward has no q8_0 kernel; it takes f32, bf16 and f16");
        selected.push_back(custom_case);
      }
    }
  }
  Require(!selected.empty(), "no case is left by --case and --dtype");
  Require(!options.int8_queries || std::any_of(selected.begin(), selected.end(),
                                               [](const BenchCase& c) { return c.int8_queries; }),
          "--int8-queries is for decoding of q8_0: --case decode --dtype q8_0");
  return selected;
}

nlohmann::ordered_json ToJson(const BenchCase& c, const BenchOptions& options,
                              const Measurement& m) {
  const double median = Median(m.seconds);
  return {{"case", Name(c.kernel)},
          {"schedule", nullptr},
          {"layout", nullptr},
          {"ranks", 1},
          {"threads", options.threads},
          {"context", c.context},
          {"batch", c.batch},
          {"heads", c.heads},
          {"kv_heads", c.kv_heads},
          {"head_dim", c.head_dim},
          {"dtype", Name(c.dtype)},
          {"storage", Name(c.storage)},
          {"int8_queries", c.int8_queries},
          {"isa", Name(DefaultIsa())},
          {"median_us", median * 1e6},
          {"min_us", *std::min_element(m.seconds.begin(), m.seconds.end()) * 1e6},
          {"max_us", *std::max_element(m.seconds.begin(), m.seconds.end()) * 1e6},
          {IsBandwidthBound(c.kernel) ? "gbps" : "gflops", m.work / median / 1e9},
          {"limit_fraction", Median(m.fractions)},
          {"bytes_sent_per_rank", 0},
          {"messages_per_rank", 0},
          {"rounds", 0},
          {"peak_bytes_per_rank", m.peak_bytes},
          {"max_error", m.max_error},
          {"verified", m.max_error <= m.bound}};
}

void PrintHeader() {
  std::printf("%-8s %-5s %-8s %7s %6s %4s %6s %10s %15s %6s %9s  %s\n", "case", "dtype", "storage",
              "context", "heads", "dim", "batch", "median", "rate", "limit", "error", "");
}

void PrintRow(const BenchCase& c, const Measurement& m) {
  const double median = Median(m.seconds);
  char heads[16];
  std::snprintf(heads, sizeof(heads), "%d/%d", c.heads, c.kv_heads);
  char rate[32];
  std::snprintf(rate, sizeof(rate), "%.1f %s", m.work / median / 1e9,
                IsBandwidthBound(c.kernel) ? "GB/s" : "GFLOP/s");
  std::printf("%-8s %-5s %-8s %7lld %6s %4d %6d %7.3f ms %15s %6.2f %9.1e  %s%s\n",
              std::string(Name(c.kernel)).c_str(), std::string(Name(c.dtype)).c_str(),
              std::string(Name(c.storage)).c_str(), static_cast<long long>(c.context), heads,
              c.head_dim, c.batch, median * 1e3, rate, Median(m.fractions), m.max_error,
              m.max_error <= m.bound ? "ok" : "WRONG",
              *c.note == '\0' ? "" : (std::string(", ") + c.note).c_str());
  std::fflush(stdout);
}

void RunBenchKernel(const BenchOptions& options) {
  if (!IsFirst()) return;  // others would only disturb what is measured
  const std::vector<BenchCase> cases = SelectCases(options);
  const Isa isa = DefaultIsa();
  const Machine machine = DescribeMachine();
  ThreadPool pool(options.threads);
  const Limits limits = MeasureLimits({.pool = &pool, .isa = isa});
  const bool print = options.json != "-";
  if (print) {
    std::printf("%s, %s, %d threads: reads %.1f GB/s, multiplies and adds %.1f GFLOP/s\n",
                machine.cpu.c_str(), std::string(Name(isa)).c_str(), options.threads,
                limits.read_gbps, limits.fma_gflops);
    PrintHeader();
  }
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  const BenchCase* wrong = nullptr;
  Progress progress("bench", print ? 0 : cases.size());
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const Measurement m = MeasureCase(cases[i], options.repeats, options.seed, pool);
    if (print) PrintRow(cases[i], m);
    if (!(m.max_error <= m.bound)) wrong = &cases[i];
    rows.push_back(ToJson(cases[i], options, m));
    progress.Set(i + 1);
  }
  WriteJson(options.json,
            {{"machine", ToJson(machine, isa)}, {"limits", ToJson(limits)}, {"rows", rows}});
  if (wrong != nullptr) {
    Throw<CheckFailure>(Name(wrong->kernel), " ", Name(wrong->dtype),
                        " gave a wrong result; its row says how far it is off");
  }
}

}  // namespace

void AddBenchKernel(CLI::App& bench) {
  CLI::App* command = bench.add_subcommand(
      "kernel", "Decode, forward, backward and merge on one device, each beside its limit");
  command->footer(
      "Without shape flags a table of cases runs; with them, one shape per kernel. `limit` is the "
      "fraction of\nwhat the machine can do at most, measured before and after each repetition: "
      "read bandwidth for decode and\nmerge, multiply-adds for forward and backward. Every result "
      "is checked against the float64 oracle.\ndocs/bench.md derives every column.\n\n"
      "Examples:\n  treeline bench kernel --quick\n"
      "  treeline bench kernel --case decode --dtype bf16,q8_0 --json -\n"
      "  TREELINE_ISA=avx2 treeline bench kernel --case forward --context 4096 --head-dim 64");
  auto options = std::make_shared<BenchOptions>();
  command->add_option("--case", options->kernels, "Kernels to time")
      ->delimiter(',')
      ->check(CLI::IsMember({"decode", "forward", "backward", "merge"}))
      ->type_name("LIST");
  command->add_option("--dtype", options->dtypes, "Types of K and V")
      ->delimiter(',')
      ->check(CLI::IsMember({"f32", "bf16", "f16", "q8_0"}))
      ->type_name("LIST");
  command->add_option("--context", options->contexts, "Keys of a sequence")
      ->delimiter(',')
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 32))
      ->type_name("LIST");
  command->add_option("--heads", options->heads, "Query heads")
      ->check(CLI::Range(1, 65536))
      ->type_name("N");
  command->add_option("--kv-heads", options->kv_heads, "Key and value heads")
      ->check(CLI::Range(1, 65536))
      ->type_name("N");
  command->add_option("--head-dim", options->head_dim, "Head dim")
      ->check(CLI::Range(8, AttentionSpec::kMaxHeadDim))
      ->type_name("N");
  command->add_option("--batch", options->batch, "Sequences; for merge, partials")
      ->check(CLI::Range(1, 65536))
      ->type_name("N");
  command->add_flag("--int8-queries", options->int8_queries,
                    "Let queries that meet q8_0 keys be rounded to 8 bits");
  command->add_option("--repeats", options->repeats, "Times each case is measured")
      ->check(CLI::Range(1, 10000))
      ->capture_default_str()
      ->type_name("N");
  command->add_flag("--quick", options->quick, "One case of each kernel");
  command->add_option("--seed", options->seed, "Seed of the inputs")
      ->capture_default_str()
      ->type_name("N");
  AddThreadsOption(*command, options->threads);
  AddJsonOption(*command, options->json);
  command->callback([options] { RunBenchKernel(*options); });
}

}  // namespace treeline::cli
