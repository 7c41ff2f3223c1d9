#include "cli/measure_kernel.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>

#include "cli/limits.h"
#include "treeline/memory.h"
#include "treeline/reference.h"

namespace treeline::cli {
namespace {

constexpr int kPageSlots = 256;

DType QueryType(const BenchCase& c) { return c.dtype == DType::kQ8_0 ? DType::kF32 : c.dtype; }

AttentionSpec SpecOf(const BenchCase& c) {
  AttentionSpec spec = AttentionSpec::Make(c.heads, c.kv_heads, c.head_dim);
  spec.causal = true;
  spec.int8_queries = c.int8_queries;
  return spec;
}

Arithmetic ArithmeticOf(const BenchCase& c, Isa isa) {
  return ArithmeticOf(c.kernel, isa, SpecOf(c), QueryType(c), c.dtype);
}

ProblemShape MakeShape(const BenchCase& c, std::uint64_t seed) {
  ProblemShape shape;
  shape.spec = SpecOf(c);
  shape.q_dtype = QueryType(c);
  shape.kv_dtype = c.dtype;
  shape.storage = c.storage;
  shape.page_slots = kPageSlots;
  shape.seed = seed;
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

Measurement MeasureAttend(const BenchCase& c, int repeats, std::uint64_t seed, Context context,
                          MemoryTracker& memory) {
  Problem problem(MakeShape(c, seed));
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
                  : Peak(context, ArithmeticOf(c, *context.isa));
  };
  Measurement m = Measure(repeats, work, limit, [&] { Attend(spec, problem.tasks(), context); });
  VerifyRows(problem, m);
  m.peak_bytes = memory.peak();
  return m;
}

Measurement MeasureBackward(const BenchCase& c, int repeats, std::uint64_t seed, Context context,
                            MemoryTracker& memory) {
  Problem problem(MakeShape(c, seed));
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
      repeats, work, [&] { return Peak(context, ArithmeticOf(c, *context.isa)); },
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

Measurement MeasureMerge(const BenchCase& c, int repeats, std::uint64_t seed, Context context,
                         MemoryTracker& memory) {
  const auto rows = static_cast<std::size_t>(c.context) * static_cast<std::size_t>(c.heads);
  const auto dim = static_cast<std::size_t>(c.head_dim);
  const auto count = static_cast<std::size_t>(c.batch);
  const std::size_t bytes = rows * (dim + 1) * sizeof(float);
  const HugeBuffer buffer(bytes * (count + 1));
  memory.Add(Purpose::kShard, bytes * count);
  memory.Add(Purpose::kResult, bytes);
  std::mt19937_64 random(seed);
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
      repeats, static_cast<double>(bytes * (count + 1)),
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

}  // namespace

Measurement MeasureCase(const BenchCase& c, int repeats, std::uint64_t seed, ThreadPool& pool) {
  MemoryTracker memory;
  const Context context{.pool = &pool, .memory = &memory, .isa = DefaultIsa()};
  Measurement m;
  switch (c.kernel) {
    case Kernel::kDecode:
    case Kernel::kForward:
      m = MeasureAttend(c, repeats, seed, context, memory);
      break;
    case Kernel::kBackward:
      m = MeasureBackward(c, repeats, seed, context, memory);
      break;
    case Kernel::kMerge:
      m = MeasureMerge(c, repeats, seed, context, memory);
      break;
  }
  m.bound =
      c.kernel == Kernel::kMerge ? Bound(c.kernel) : Bound(c.kernel, ArithmeticOf(c, *context.isa));
  return m;
}

}  // namespace treeline::cli
