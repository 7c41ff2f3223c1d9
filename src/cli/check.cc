#include "cli/check.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "cli/deal.h"
#include "cli/limits.h"
#include "kernels/cpu/kernel_table.h"
#include "treeline/reference.h"

namespace treeline::cli {
namespace {

// One task's keys on one rank.
struct Shard {
  DealtKeys keys;
  std::vector<float> out;
  std::vector<float> lse;
  AttendTask task;
};

// `layout` is over the slots of `whole`, which are a whole sequence.
Shard MakeShard(const AttentionSpec& spec, const AttendTask& whole, const Layout& layout,
                int rank) {
  Shard shard;
  shard.keys = DealKeys(whole.kv, layout.Shard(rank));
  shard.out.resize(whole.result.out.size());
  shard.lse.resize(whole.result.lse.size());
  shard.task = whole;
  shard.task.kv = shard.keys.view;
  shard.task.kv_positions = layout.Shard(rank);
  shard.task.result = {shard.out, shard.lse, spec.v_head_dim};
  return shard;
}

double ErrorOf(const Partial& actual, const reference::Result& expected) {
  return std::max(reference::MaxError(actual.out, expected.out),
                  reference::MaxError(actual.lse, expected.lse)) /
         reference::BoundGrowth(expected.score_magnitude);
}

void Raise(Errors& errors, Kernel kernel, double error) {
  double& worst = errors[static_cast<std::size_t>(kernel)];
  // A NaN is no smaller than any bound.
  worst = std::isnan(error) ? std::numeric_limits<double>::infinity() : std::max(worst, error);
}

std::span<const float> Values(const GradView& view) {
  return {view.data, static_cast<std::size_t>(view.tokens * view.heads * view.dim)};
}

}  // namespace

std::string_view Name(Kernel kernel) {
  switch (kernel) {
    case Kernel::kDecode:
      return "decode";
    case Kernel::kForward:
      return "forward";
    case Kernel::kBackward:
      return "backward";
    case Kernel::kMerge:
      return "merge";
  }
  return "?";
}

std::string_view Name(Arithmetic arithmetic) {
  switch (arithmetic) {
    case Arithmetic::kF32:
      return "f32";
    case Arithmetic::kBf16:
      return "bf16";
    case Arithmetic::kToBf16:
      return "to bf16";
    case Arithmetic::kToTwoTerms:
      return "2 x bf16";
    case Arithmetic::kInt8Queries:
      return "int8";
  }
  return "?";
}

Arithmetic ArithmeticOf(Kernel kernel, Isa isa, const AttentionSpec& spec, DType q, DType kv) {
  if (spec.int8_queries && kv == DType::kQ8_0 && kernel != Kernel::kForward &&
      cpu::TableFor(isa).rounds_queries) {
    return Arithmetic::kInt8Queries;
  }
  if (kernel == Kernel::kDecode || !ComputesInBf16(isa)) return Arithmetic::kF32;
  if (q == DType::kBF16 && kv == DType::kBF16) return Arithmetic::kBf16;
  if (kernel == Kernel::kBackward) return Arithmetic::kF32;  // see CheckBackward()
  if (spec.bf16_terms == 0 || spec.bf16_terms > cpu::TableFor(isa).bf16_terms) {
    return Arithmetic::kF32;
  }
  return spec.bf16_terms == 1 ? Arithmetic::kToBf16 : Arithmetic::kToTwoTerms;
}

double Peak(const Context& context, Arithmetic arithmetic) {
  const bool in_bf16 = arithmetic != Arithmetic::kF32 && arithmetic != Arithmetic::kInt8Queries;
  return in_bf16 ? Bf16Peak(context) : FmaPeak(context);
}

double Bound(Kernel kernel, Arithmetic arithmetic) {
  const bool backward = kernel == Kernel::kBackward;
  switch (arithmetic) {
    case Arithmetic::kF32:
      return backward ? 1e-4 : 1e-5;
    case Arithmetic::kBf16:
      return backward ? 2e-2 : 8e-3;
    case Arithmetic::kToBf16:
      return 2e-2;
    case Arithmetic::kToTwoTerms:
      return 8e-3;
    case Arithmetic::kInt8Queries:
      return 5e-2;
  }
  return 0.0;
}

Kernel KernelOf(const AttentionSpec& spec, const AttendTask& task) {
  return task.q.tokens * spec.group() <= cpu::kDecodeRows ? Kernel::kDecode : Kernel::kForward;
}

struct Checker::Impl {
  Impl(const ProblemShape& shape, LayoutKind layout, int ranks) : problem(shape) {
    const AttentionSpec& spec = problem.spec();
    gradients = shape.kv_dtype != DType::kQ8_0 &&
                std::max(spec.head_dim, spec.v_head_dim) <= AttentionSpec::kMaxBackwardHeadDim;
    for (const AttendTask& task : problem.tasks()) {
      expected.push_back(reference::Attend(spec, task));
      with_sinks.push_back(reference::Attend(spec, task, reference::Sinks::kInclude));
      std::vector<Shard>& of_task = shards.emplace_back();
      if (!IsWholeSequence(task.kv_positions)) continue;
      const Layout dealt = MakeLayout(layout, task.kv.slots, ranks);
      for (int r = 0; r < ranks; ++r) of_task.push_back(MakeShard(spec, task, dealt, r));
    }
    if (gradients) {
      for (const BackwardTask& task : problem.MakeBackward()) {
        expected_gradients.push_back(reference::Backward(spec, task));
      }
    }
  }

  Errors Run(const Context& context) {
    Errors errors;
    errors.fill(-1.0);
    CheckAttend(context, errors);
    CheckShards(context, errors);
    if (gradients) CheckBackward(context, errors);
    return errors;
  }

  void CheckAttend(const Context& context, Errors& errors) {
    problem.ClearResults();
    Attend(problem.spec(), problem.tasks(), context);
    for (std::size_t i = 0; i < problem.tasks().size(); ++i) {
      const AttendTask& task = problem.tasks()[i];
      Raise(errors, KernelOf(problem.spec(), task), ErrorOf(task.result, expected[i]));
    }
  }

  void CheckShards(const Context& context, Errors& errors) {
    for (std::size_t i = 0; i < shards.size(); ++i) {
      if (shards[i].empty()) continue;
      std::vector<AttendTask> tasks;
      std::vector<Partial> parts;
      for (const Shard& shard : shards[i]) {
        tasks.push_back(shard.task);
        parts.push_back(shard.task.result);
      }
      Attend(problem.spec(), tasks, context);
      const Partial& merged = problem.tasks()[i].result;
      Merge(parts, merged, context);
      ApplySinks(problem.spec(), merged);
      Raise(errors, Kernel::kMerge, ErrorOf(merged, with_sinks[i]));
    }
  }

  void CheckBackward(const Context& context, Errors& errors) {
    // What rounding leaves of a result is the same for all rows that see the same keys, and adds up
    // in their gradients: there is no bound for those of results that were rounded.
    AttentionSpec spec = problem.spec();
    spec.bf16_terms = 0;
    problem.ClearResults();
    Attend(spec, problem.tasks(), context);
    for (const AttendTask& task : problem.tasks()) ApplySinks(spec, task.result);
    const std::vector<BackwardTask>& tasks = problem.MakeBackward();
    AttendBackward(spec, tasks, context);
    for (std::size_t i = 0; i < tasks.size(); ++i) {
      const reference::Gradients& want = expected_gradients[i];
      double error = std::max({reference::MaxError(Values(tasks[i].dq), want.dq),
                               reference::MaxError(Values(tasks[i].dk), want.dk),
                               reference::MaxError(Values(tasks[i].dv), want.dv)});
      if (!spec.sinks.empty()) {
        std::vector<float> d_sinks(spec.sinks.size(), 0.0f);
        SinksBackward(spec, tasks[i].out, tasks[i].d_out, tasks[i].lse, d_sinks);
        error = std::max(error, reference::MaxError(d_sinks, want.dsinks));
      }
      Raise(errors, Kernel::kBackward,
            error / reference::BoundGrowth(with_sinks[i].score_magnitude));
    }
  }

  Problem problem;
  bool gradients = false;
  std::vector<std::vector<Shard>> shards;  // [task, rank]; none for a task that is a shard itself
  std::vector<reference::Result> expected;
  std::vector<reference::Result> with_sinks;
  std::vector<reference::Gradients> expected_gradients;
};

Checker::Checker(const ProblemShape& shape, LayoutKind layout, int ranks)
    : impl_(std::make_unique<Impl>(shape, layout, ranks)) {}
Checker::~Checker() = default;
Errors Checker::Run(const Context& context) { return impl_->Run(context); }

RandomCase MakeRandomCase(std::uint64_t seed, std::uint64_t index) {
  std::mt19937_64 random(seed * 0x9E3779B97F4A7C15u + index);
  const auto below = [&](std::int64_t n) {
    return std::uniform_int_distribution<std::int64_t>(0, n - 1)(random);
  };
  const auto pick = [&]<class List>(const List& list) {
    return list[static_cast<std::size_t>(below(static_cast<std::int64_t>(std::size(list))))];
  };
  const auto chance = [&](int in) { return below(in) == 0; };
  const auto real = [&](float low, float high) {
    return std::uniform_real_distribution<float>(low, high)(random);
  };

  constexpr int kDims[] = {8, 16, 24, 64, 64, 72, 80, 96, 128, 128, 128, 192, 200, 256};
  constexpr int kGroups[] = {1, 1, 2, 3, 4, 4, 5, 8, 9};
  constexpr std::int64_t kLengths[] = {0, 1, 2, 3, 15, 16, 17, 63, 64, 65, 96, 127, 129, 200, 301};
  constexpr std::int64_t kNewTokens[] = {1, 1, 1, 2, 3, 5};

  RandomCase result;
  ProblemShape& shape = result.shape;
  shape.seed = random();
  const int kv_heads = static_cast<int>(1 + below(3));
  shape.spec = AttentionSpec::Make(kv_heads * pick(kGroups), kv_heads, pick(kDims));
  AttentionSpec& spec = shape.spec;
  if (chance(8)) spec.v_head_dim = pick(kDims);
  if (chance(24)) {  // multi-head latent attention
    spec = AttentionSpec::Make(static_cast<int>(1 + below(20)), 1, 576);
    spec.v_head_dim = 512;
  }
  shape.q_dtype = pick(std::array{DType::kF32, DType::kBF16, DType::kF16});
  shape.kv_dtype = pick(kAllDTypes);
  shape.storage = pick(std::array{Storage::kDense, Storage::kPadded, Storage::kPaged});
  shape.page_slots = pick(std::array<std::int64_t, 5>{1, 7, 16, 64, 256});
  spec.causal = chance(2);
  if (chance(4)) spec.window = 1 + below(chance(2) ? 8 : 200);
  if (chance(3)) spec.bf16_terms = static_cast<int>(1 + below(AttentionSpec::kMaxBf16Terms));
  spec.int8_queries = shape.kv_dtype == DType::kQ8_0 && chance(2);
  if (chance(6)) spec.softcap = real(1.0f, 50.0f);
  if (chance(6)) {
    for (int h = 0; h < spec.heads; ++h) spec.alibi_slopes.push_back(real(0.0f, 0.5f));
  }
  if (chance(6)) {
    for (int h = 0; h < spec.heads; ++h) spec.sinks.push_back(real(-3.0f, 6.0f));
  }
  if (chance(12)) shape.magnitude = 30.0f;  // scores of a hundred and more
  if (chance(24)) shape.magnitude = 1e-20f;

  const std::int64_t sequences = chance(3) ? below(4) : 1;
  for (std::int64_t s = 0; s < sequences; ++s) {
    const std::int64_t keys = chance(3) ? below(700) : pick(kLengths);
    std::int64_t tokens = pick(kNewTokens);
    if (chance(2)) {
      // Many rows, within what the oracle does in a few milliseconds.
      const std::int64_t budget = 3'000'000 / (std::max<std::int64_t>(keys, 1) * spec.heads *
                                               (spec.head_dim + spec.v_head_dim));
      tokens = std::clamp<std::int64_t>(below(chance(2) ? 70 : 400), 0,
                                        std::max<std::int64_t>(budget, 1));
    }
    const std::int64_t first =
        chance(2) ? std::max<std::int64_t>(keys - tokens, 0) : below(keys + 9);
    // Usually a whole sequence; otherwise one rank's part of a longer one.
    ProblemShape::Sequence sequence{Positions::Contiguous(first, tokens),
                                    Positions::Contiguous(0, keys)};
    if (chance(5)) {
      const int ranks = static_cast<int>(1 + below(9));
      const LayoutKind kind =
          pick(std::array{LayoutKind::kContiguous, LayoutKind::kStriped, LayoutKind::kZigzag});
      sequence.kv_positions = MakeLayout(kind, keys, ranks).Shard(static_cast<int>(below(ranks)));
    }
    shape.sequences.push_back(sequence);
  }
  result.layout =
      pick(std::array{LayoutKind::kContiguous, LayoutKind::kStriped, LayoutKind::kZigzag});
  result.ranks = static_cast<int>(1 + below(chance(10) ? 64 : 9));
  return result;
}

}  // namespace treeline::cli
