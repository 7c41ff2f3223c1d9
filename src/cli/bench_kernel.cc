#include "cli/bench_kernel.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <memory>
#include <optional>
#include <random>

#include "cli/check.h"
#include "cli/limits.h"
#include "cli/machine.h"
#include "cli/problem.h"
#include "cli/report.h"
#include "core/check.h"
#include "treeline/memory.h"
#include "treeline/reference.h"
#include "treeline/thread_pool.h"

namespace treeline::cli {
namespace {

// One row of the table.
struct BenchCase {
  Kernel kernel;
  DType dtype = DType::kF32;
  Storage storage = Storage::kDense;
  std::int64_t context = 0;
  int heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
  int batch = 1;  // sequences, one after the other in memory; merge: partials
  const char* note = "";
};

constexpr int kPageSlots = 256;

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

// What was measured of a case.
struct Measurement {
  std::vector<double> seconds;
  std::vector<double> fractions;  // of the limit, measured next to each time
  double work = 0.0;              // bytes or floating-point operations
  double max_error = 0.0;
  double bound = 0.0;
  std::size_t peak_bytes = 0;
};

struct BenchOptions {
  std::vector<std::string> kernels;
  std::vector<std::string> dtypes;
  std::vector<std::int64_t> contexts;
  int heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
  int batch = 0;
  int threads = 1;
  int repeats = 7;
  bool quick = false;
  std::uint64_t seed = 1;
  std::string json;
};

ProblemShape MakeShape(const BenchCase& c, std::uint64_t seed) {
  ProblemShape shape;
  shape.spec = AttentionSpec::Make(c.heads, c.kv_heads, c.head_dim);
  shape.q_dtype = c.dtype == DType::kQ8_0 ? DType::kF32 : c.dtype;
  shape.kv_dtype = c.dtype;
  shape.storage = c.storage;
  shape.page_slots = kPageSlots;
  shape.seed = seed;
  shape.spec.causal = true;
  const std::int64_t tokens = c.kernel == Kernel::kDecode ? 1 : c.context;
  for (int s = 0; s < c.batch; ++s) {
    shape.sequences.push_back(
        {Positions::Contiguous(c.context - tokens, tokens), Positions::Contiguous(0, c.context)});
  }
  return shape;
}

// Alternates the limit and the work, so that both see the same machine.
Measurement Measure(int repeats, double work, const std::function<double()>& limit,
                    const std::function<void()>& body) {
  Measurement m;
  m.work = work;
  body();  // warm-up
  for (int i = 0; i < repeats; ++i) {
    const double before = limit();
    const double seconds = TimeOnce(body);
    const double after = limit();
    m.seconds.push_back(seconds);
    m.fractions.push_back(work / seconds / ((before + after) / 2));
  }
  return m;
}

// Some rows of every task against the oracle.
void VerifyRows(const Problem& problem, Measurement& m) {
  constexpr int kRows = 6;
  std::mt19937_64 random(1);
  const AttentionSpec& spec = problem.spec();
  const auto dim = static_cast<std::size_t>(spec.v_head_dim);
  for (const AttendTask& task : problem.tasks()) {
    std::vector<std::int64_t> rows;
    std::vector<float> out;
    std::vector<float> lse;
    for (int i = 0; i < kRows; ++i) {
      const auto row = static_cast<std::size_t>(random() % task.result.rows());
      rows.push_back(static_cast<std::int64_t>(row));
      const auto values = task.result.out.subspan(row * dim, dim);
      out.insert(out.end(), values.begin(), values.end());
      lse.push_back(task.result.lse[row]);
    }
    const reference::Result expected = reference::AttendRows(spec, task, rows);
    const double error =
        std::max(reference::MaxError(out, expected.out), reference::MaxError(lse, expected.lse));
    m.max_error = std::max(m.max_error, error / reference::BoundGrowth(expected.score_magnitude));
    if (problem.tasks().size() > 4 && &task == &problem.tasks()[3]) break;  // four are enough
  }
}

// Gradients of some queries and of some keys of the first task.
void VerifyGradients(const AttentionSpec& spec, const BackwardTask& task, Measurement& m) {
  constexpr int kChecked = 3;
  const auto qk_dim = static_cast<std::size_t>(spec.head_dim);
  const auto v_dim = static_cast<std::size_t>(spec.v_head_dim);
  std::mt19937_64 random(1);
  for (int n = 0; n < kChecked; ++n) {
    const auto token =
        static_cast<std::int64_t>(random() % static_cast<std::size_t>(task.q.tokens));
    const auto slot = static_cast<std::int64_t>(random() % static_cast<std::size_t>(task.kv.slots));
    const int head = static_cast<int>(random() % static_cast<std::size_t>(spec.heads));
    const int kv_head = head / spec.group();
    const auto dq = reference::QueryGradient(spec, task, token, head);
    const auto [dk, dv] = reference::KeyGradientOf(spec, task, slot, kv_head);
    m.max_error =
        std::max({m.max_error, reference::MaxError({task.dq.Row(token, head), qk_dim}, dq),
                  reference::MaxError({task.dk.Row(slot, kv_head), qk_dim}, dk),
                  reference::MaxError({task.dv.Row(slot, kv_head), v_dim}, dv)});
  }
}

Measurement MeasureAttend(const BenchCase& c, const BenchOptions& options, Context context,
                          MemoryTracker& memory) {
  Problem problem(MakeShape(c, options.seed));
  std::size_t result_bytes = 0;
  for (const AttendTask& task : problem.tasks()) {
    result_bytes += task.result.out.size_bytes() + task.result.lse.size_bytes();
  }
  memory.Add(Purpose::kShard, problem.kv_bytes());
  memory.Add(Purpose::kResult, result_bytes);
  const bool decode = c.kernel == Kernel::kDecode;
  const AttentionSpec& spec = problem.spec();
  const double work =
      decode ? static_cast<double>(problem.kv_bytes())
             : 2.0 * static_cast<double>(problem.pairs()) * (spec.head_dim + spec.v_head_dim);
  const auto limit = [&] {
    return decode ? ReadBandwidth(context, problem.kv_memory().data(), problem.kv_memory().size())
                  : FmaPeak(context);
  };
  Measurement m =
      Measure(options.repeats, work, limit, [&] { Attend(spec, problem.tasks(), context); });
  VerifyRows(problem, m);
  m.peak_bytes = memory.peak();
  return m;
}

Measurement MeasureBackward(const BenchCase& c, const BenchOptions& options, Context context,
                            MemoryTracker& memory) {
  Problem problem(MakeShape(c, options.seed));
  const AttentionSpec& spec = problem.spec();
  Attend(spec, problem.tasks(), context);
  memory.ResetPeaks();
  std::size_t result_bytes = 0;
  for (const BackwardTask& task : problem.MakeBackward()) {
    result_bytes +=
        sizeof(float) * static_cast<std::size_t>(task.dq.tokens * task.dq.heads * task.dq.dim +
                                                 task.dk.tokens * task.dk.heads * task.dk.dim +
                                                 task.dv.tokens * task.dv.heads * task.dv.dim);
  }
  memory.Add(Purpose::kShard, problem.kv_bytes());
  memory.Add(Purpose::kResult, result_bytes);
  const double work =
      2.0 * static_cast<double>(problem.pairs()) * (3.0 * spec.head_dim + 2.0 * spec.v_head_dim);
  const std::vector<BackwardTask>* tasks = nullptr;
  Measurement m = Measure(
      options.repeats, work, [&] { return FmaPeak(context); },
      [&] {
        if (tasks == nullptr) tasks = &problem.MakeBackward();
        AttendBackward(spec, *tasks, context);
      });
  tasks = &problem.MakeBackward();  // gradients from 0, once
  AttendBackward(spec, *tasks, context);
  VerifyGradients(spec, tasks->front(), m);
  m.peak_bytes = memory.peak();
  return m;
}

Measurement MeasureMerge(const BenchCase& c, const BenchOptions& options, Context context,
                         MemoryTracker& memory) {
  const auto rows = static_cast<std::size_t>(c.context) * static_cast<std::size_t>(c.heads);
  const auto dim = static_cast<std::size_t>(c.head_dim);
  const auto count = static_cast<std::size_t>(c.batch);
  const std::size_t bytes = rows * (dim + 1) * sizeof(float);
  const HugeBuffer buffer(bytes * (count + 1));
  memory.Add(Purpose::kShard, bytes * count);
  memory.Add(Purpose::kResult, bytes);
  std::mt19937_64 random(options.seed);
  std::normal_distribution<float> normal;
  std::vector<Partial> parts;
  for (std::size_t p = 0; p <= count; ++p) {
    auto* base = reinterpret_cast<float*>(buffer.data() + p * bytes);
    parts.push_back({{base, rows * dim}, {base + rows * dim, rows}, c.head_dim});
    for (float& x : parts.back().out) x = normal(random);
    for (float& x : parts.back().lse) x = normal(random);
  }
  const Partial target = parts.back();
  parts.pop_back();
  Measurement m = Measure(
      options.repeats, static_cast<double>(bytes * (count + 1)),
      [&] { return ReadBandwidth(context, buffer.data(), bytes * (count + 1)); },
      [&] { Merge(parts, target, context); });
  for (std::size_t row = 0; row < rows; row += std::max<std::size_t>(rows / 64, 1)) {
    double total = 0.0;
    std::vector<double> out(dim);
    for (const Partial& part : parts) {
      const double weight = std::exp(static_cast<double>(part.lse[row]));
      total += weight;
      for (std::size_t d = 0; d < dim; ++d) out[d] += weight * part.out[row * dim + d];
    }
    for (double& x : out) x /= total;
    const std::vector<double> lse{std::log(total)};
    m.max_error =
        std::max({m.max_error, reference::MaxError(target.out.subspan(row * dim, dim), out),
                  reference::MaxError(target.lse.subspan(row, 1), lse)});
  }
  m.peak_bytes = memory.peak();
  return m;
}

Measurement MeasureCase(const BenchCase& c, const BenchOptions& options, ThreadPool& pool) {
  MemoryTracker memory;
  const Context context{.pool = &pool, .memory = &memory, .isa = DefaultIsa()};
  Measurement m;
  switch (c.kernel) {
    case Kernel::kDecode:
    case Kernel::kForward:
      m = MeasureAttend(c, options, context, memory);
      break;
    case Kernel::kBackward:
      m = MeasureBackward(c, options, context, memory);
      break;
    case Kernel::kMerge:
      m = MeasureMerge(c, options, context, memory);
      break;
  }
  m.bound = Bound(c.kernel);
  return m;
}

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
                      !options.contexts.empty() || options.batch > 0;
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
        Validate(
            AttentionSpec::Make(custom_case.heads, custom_case.kv_heads, custom_case.head_dim));
        Require(custom_case.dtype != DType::kQ8_0 || c.kernel != Kernel::kBackward,
                "backward has no q8_0 kernel; it takes f32, bf16 and f16");
        selected.push_back(custom_case);
      }
    }
  }
  Require(!selected.empty(), "no case is left by --case and --dtype");
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
    const Measurement m = MeasureCase(cases[i], options, pool);
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
