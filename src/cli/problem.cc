#include "cli/problem.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <random>
#include <sstream>
#include <utility>

namespace treeline::cli {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::int64_t kPadding = 32;  // bytes between padded rows, a multiple of any alignment
// Rows beyond this many repeat earlier ones: making random numbers must not take longer than using
// them.
constexpr std::size_t kDistinctRows = 4099;

// Random rows of one type.
class RowSource {
 public:
  RowSource(DType dtype, int dim, float magnitude, std::size_t rows, std::uint64_t seed)
      : row_bytes_(RowBytes(dtype, dim)),
        rows_(std::clamp<std::size_t>(rows, 1, kDistinctRows)),
        bytes_(rows_ * row_bytes_) {
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal(0.0f, magnitude);
    std::vector<float> row(static_cast<std::size_t>(dim));
    for (std::size_t r = 0; r < rows_; ++r) {
      for (float& x : row) x = normal(random);
      EncodeRow(dtype, row, bytes_.data() + r * row_bytes_);
    }
  }
  void CopyNext(std::byte* target) {
    std::memcpy(target, bytes_.data() + next_ % rows_ * row_bytes_, row_bytes_);
    ++next_;
  }

 private:
  std::size_t row_bytes_;
  std::size_t rows_;
  std::vector<std::byte> bytes_;
  std::size_t next_ = 0;
};

// One side (K or V) of one sequence within the memory of all.
struct SidePlan {
  std::int64_t slot_stride;
  std::int64_t head_stride;
  std::int64_t page_bytes;
  std::int64_t pages;
};

SidePlan PlanSide(const ProblemShape& shape, std::int64_t slots, int dim) {
  const auto row = static_cast<std::int64_t>(RowBytes(shape.kv_dtype, dim));
  const std::int64_t heads = shape.spec.kv_heads;
  if (shape.storage == Storage::kPaged) {
    const std::int64_t pages = (slots + shape.page_slots - 1) / shape.page_slots;
    return {row, row * shape.page_slots, row * shape.page_slots * heads, pages};
  }
  const std::int64_t padding = shape.storage == Storage::kPadded ? kPadding : 0;
  const std::int64_t head_stride = row + padding;
  const std::int64_t slot_stride = head_stride * heads + 2 * padding;
  return {slot_stride, head_stride, slot_stride * slots, 1};
}

std::int64_t SideBytes(const SidePlan& plan) { return plan.page_bytes * plan.pages; }

}  // namespace

std::string_view Name(Storage storage) {
  switch (storage) {
    case Storage::kDense:
      return "strided";
    case Storage::kPadded:
      return "padded";
    case Storage::kPaged:
      return "paged";
  }
  return "?";
}

HugeBuffer::HugeBuffer(std::size_t bytes, const std::function<void()>& pause)
    : HugeBuffer() {  // so that the destructor runs if pause() throws
  bytes_ = (std::max<std::size_t>(bytes, 1) + kHugePage - 1) / kHugePage * kHugePage;
  void* p = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<std::byte*>(p);
  madvise(data_, bytes_, MADV_HUGEPAGE);  // a hint: small pages work too
  for (std::size_t done = 0; done < bytes_; done += kPiece) {
    std::memset(data_ + done, std::to_integer<int>(kPoison), std::min(kPiece, bytes_ - done));
    pause();
  }
}

HugeBuffer::~HugeBuffer() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

HugeBuffer::HugeBuffer(HugeBuffer&& other) noexcept { *this = std::move(other); }

HugeBuffer& HugeBuffer::operator=(HugeBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

std::string ProblemShape::Describe() const {
  std::ostringstream text;
  text << "heads " << spec.heads << "/" << spec.kv_heads << ", dim " << spec.head_dim << "/"
       << spec.v_head_dim << ", scale " << spec.scale << ", q " << Name(q_dtype) << ", kv "
       << Name(kv_dtype) << " " << Name(storage);
  if (storage == Storage::kPaged) text << " by " << page_slots;
  if (spec.causal) text << ", causal";
  if (spec.window > 0) text << ", window " << spec.window;
  if (spec.bf16_terms > 0) text << ", bf16 terms " << spec.bf16_terms;
  if (spec.int8_queries) text << ", int8 queries";
  if (spec.softcap > 0.0f) text << ", softcap " << spec.softcap;
  if (!spec.alibi_slopes.empty()) text << ", alibi";
  if (!spec.sinks.empty()) text << ", sinks";
  text << ", magnitude " << magnitude << ", seed " << seed << ", queries x keys";
  for (const Sequence& s : sequences) {
    text << " " << s.q_positions.count() << "x" << s.kv_positions.count();
  }
  return text.str();
}

Problem::Problem(const ProblemShape& shape) : shape_(shape), memory_(shape.sequences.size()) {
  const AttentionSpec& spec = shape_.spec;
  std::int64_t total = 0;
  for (const auto& sequence : shape_.sequences) {
    const std::int64_t slots = sequence.kv_positions.count();
    total += SideBytes(PlanSide(shape_, slots, spec.head_dim)) +
             SideBytes(PlanSide(shape_, slots, spec.v_head_dim));
    kv_bytes_ +=
        static_cast<std::size_t>(slots * spec.kv_heads) *
        (RowBytes(shape_.kv_dtype, spec.head_dim) + RowBytes(shape_.kv_dtype, spec.v_head_dim));
  }
  kv_ = HugeBuffer(static_cast<std::size_t>(total));

  std::mt19937_64 random(shape_.seed);
  RowSource queries(shape_.q_dtype, spec.head_dim, shape_.magnitude, kDistinctRows, random());
  RowSource keys(shape_.kv_dtype, spec.head_dim, 1.0f, kDistinctRows, random());
  RowSource values(shape_.kv_dtype, spec.v_head_dim, 1.0f, kDistinctRows, random());
  std::byte* next = kv_.data();
  for (std::size_t i = 0; i < memory_.size(); ++i) {
    const auto& sequence = shape_.sequences[i];
    SequenceMemory& memory = memory_[i];
    const std::int64_t tokens = sequence.q_positions.count();
    const std::int64_t slots = sequence.kv_positions.count();
    AttendTask task;
    task.q_positions = sequence.q_positions;
    task.kv_positions = sequence.kv_positions;

    memory.q.resize(static_cast<std::size_t>(tokens * spec.heads) *
                    RowBytes(shape_.q_dtype, spec.head_dim));
    task.q = TensorView::Dense(memory.q.data(), shape_.q_dtype, tokens, spec.heads, spec.head_dim);
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (int h = 0; h < spec.heads; ++h) {
        queries.CopyNext(const_cast<std::byte*>(task.q.Row(t, h)));
      }
    }

    const auto place = [&](int dim, std::vector<const void*>& pages, KvSide& side) {
      const SidePlan plan = PlanSide(shape_, slots, dim);
      for (std::int64_t p = 0; p < plan.pages; ++p) pages.push_back(next + p * plan.page_bytes);
      if (shape_.storage == Storage::kPaged) std::shuffle(pages.begin(), pages.end(), random);
      side = {pages.front(), nullptr, plan.slot_stride, plan.head_stride, dim};
      next += SideBytes(plan);
    };
    KvSide k{.dim = spec.head_dim};
    KvSide v{.dim = spec.v_head_dim};
    if (slots > 0) {
      place(spec.head_dim, memory.k_pages, k);
      place(spec.v_head_dim, memory.v_pages, v);
    }
    if (shape_.storage == Storage::kPaged) {
      task.kv = KvView::Paged(memory.k_pages, memory.v_pages, shape_.kv_dtype, slots,
                              shape_.page_slots, spec.kv_heads, spec.head_dim, spec.v_head_dim);
    } else {
      task.kv.k = k;
      task.kv.v = v;
      task.kv.dtype = shape_.kv_dtype;
      task.kv.slots = slots;
      task.kv.kv_heads = spec.kv_heads;
    }
    for (std::int64_t slot = 0; slot < slots; ++slot) {
      for (int h = 0; h < spec.kv_heads; ++h) {
        keys.CopyNext(const_cast<std::byte*>(task.kv.KeyRow(slot, h)));
        values.CopyNext(const_cast<std::byte*>(task.kv.ValueRow(slot, h)));
      }
    }

    const auto rows = static_cast<std::size_t>(tokens * spec.heads);
    memory.out.resize(rows * static_cast<std::size_t>(spec.v_head_dim));
    memory.lse.resize(rows);
    task.result = {memory.out, memory.lse, spec.v_head_dim};
    tasks_.push_back(task);
  }
  ClearResults();
}

std::int64_t Problem::pairs() const {
  std::int64_t pairs = 0;
  for (const AttendTask& task : tasks_) {
    for (std::int64_t t = 0; t < task.q.tokens; ++t) {
      pairs += Visible(shape_.spec, task.q_positions[t], task.kv_positions).size();
    }
  }
  return pairs * shape_.spec.heads;
}

void Problem::ClearResults() {
  for (const AttendTask& task : tasks_) {
    for (std::span<float> values : {task.result.out, task.result.lse}) {
      std::ranges::fill(std::as_writable_bytes(values), kPoison);
    }
  }
}

const std::vector<BackwardTask>& Problem::MakeBackward() {
  const AttentionSpec& spec = shape_.spec;
  backward_.clear();
  RowSource d_out(DType::kF32, spec.v_head_dim, 1.0f, kDistinctRows, shape_.seed + 1);
  for (std::size_t i = 0; i < memory_.size(); ++i) {
    SequenceMemory& memory = memory_[i];
    const AttendTask& task = tasks_[i];
    const auto row_bytes = RowBytes(DType::kF32, spec.v_head_dim);
    memory.d_out.resize(memory.out.size());
    for (std::size_t row = 0; row < memory.lse.size(); ++row) {
      d_out.CopyNext(reinterpret_cast<std::byte*>(memory.d_out.data()) + row * row_bytes);
    }
    const auto kv_rows = static_cast<std::size_t>(task.kv.slots * spec.kv_heads);
    memory.dq.assign(memory.lse.size() * static_cast<std::size_t>(spec.head_dim), 0.0f);
    memory.dk.assign(kv_rows * static_cast<std::size_t>(spec.head_dim), 0.0f);
    memory.dv.assign(kv_rows * static_cast<std::size_t>(spec.v_head_dim), 0.0f);
    const std::int64_t tokens = task.q.tokens;
    backward_.push_back(
        {.q = task.q,
         .q_positions = task.q_positions,
         .kv = task.kv,
         .kv_positions = task.kv_positions,
         .out =
             TensorView::Dense(memory.out.data(), DType::kF32, tokens, spec.heads, spec.v_head_dim),
         .d_out = TensorView::Dense(memory.d_out.data(), DType::kF32, tokens, spec.heads,
                                    spec.v_head_dim),
         .lse = memory.lse,
         .dq = GradView::Dense(memory.dq.data(), tokens, spec.heads, spec.head_dim),
         .dk = GradView::Dense(memory.dk.data(), task.kv.slots, spec.kv_heads, spec.head_dim),
         .dv = GradView::Dense(memory.dv.data(), task.kv.slots, spec.kv_heads, spec.v_head_dim)});
  }
  return backward_;
}

}  // namespace treeline::cli
