#include "model/llama_rank.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "backend/cpu/multiply.h"
#include "backend/cpu/rowwise.h"
#include "core/check.h"
#include "schedule/collective_call.h"
#include "schedule/collectives/collectives.h"

namespace treeline::model {
namespace {

constexpr std::int64_t kPageSlots = 64;

std::size_t Index(std::int64_t i) { return static_cast<std::size_t>(i); }

KvCacheOptions CacheOptions(const LlamaShape& shape, const Communicator& comm,
                            const LlamaOptions& options) {
  Require(options.tokens >= 1 && options.tokens <= std::int64_t{1} << 32, "the context is ",
          options.tokens, " tokens; it must be from 1 to ", std::int64_t{1} << 32);
  Require(options.chunk >= 0 && options.chunk <= 1 << 20, "chunk is ", options.chunk,
          "; it must be from 0 to ", 1 << 20);
  Require(options.sequences >= 1 && options.sequences <= 1 << 20, "sequences is ",
          options.sequences, "; it must be from 1 to ", 1 << 20);
  // Of a rank, in whole pages: the last one of each sequence may hold a single token.
  const std::int64_t slots = (options.tokens + comm.size() - 1) / comm.size();
  return {.rank = comm.rank(),
          .ranks = comm.size(),
          .layers = shape.layers,
          .kv_heads = shape.kv_heads,
          .head_dim = shape.head_dim,
          .v_head_dim = shape.v_head_dim,
          .dtype = options.kv_type,
          .page_slots = kPageSlots,
          .pages = slots / kPageSlots + options.sequences};
}

// Of queries and keys. With one, what ranks compute would differ by more than they may by default.
// What a CPU makes of it is its own affair: hosts may differ.
int Bf16Terms(Activations activations) {
  switch (activations) {
    case Activations::kF32:
      return 0;
    case Activations::kBf16:
      return 1;
    case Activations::kI16:
      return 2;
  }
  return 0;
}

AttentionSpec SpecOf(const LlamaShape& shape, const LlamaOptions& options) {
  AttentionSpec spec = shape.Spec();
  spec.bf16_terms = Bf16Terms(options.activations);
  spec.int8_queries = options.int8_queries;
  return spec;
}

}  // namespace

LlamaRank::LlamaRank(const LlamaModel& model, Communicator& comm, const Context& context,
                     const LlamaOptions& options)
    : model_(model),
      shape_(model.shape()),
      comm_(comm),
      context_(context),
      options_(options),
      schedule_(options.schedule),
      spec_(SpecOf(shape_, options)),
      q_rows_(std::int64_t{shape_.heads} * shape_.head_dim),
      k_rows_(std::int64_t{shape_.kv_heads} * shape_.head_dim),
      qkv_rows_(q_rows_ + k_rows_ + std::int64_t{shape_.kv_heads} * shape_.v_head_dim),
      chunk_(options.chunk > 0 ? options.chunk : DefaultChunk()),
      backend_(context),
      linear_(context_, options.activations),
      cache_(CacheOptions(shape_, comm, options), context.memory) {
  Require(!options.reproducible || 64 % comm.size() == 0, "there are ", comm.size(),
          " ranks; reproducible decoding needs a number that divides 64");
  Require(!options.reproducible || options.schedule == Schedule::kTree ||
              options.schedule == Schedule::kGather,
          "reproducible decoding needs schedule tree or gather, not ", Name(options.schedule));
  for (int i = 0; i < shape_.rope_dims / 2; ++i) {
    const double factor =
        model.rope_factors().empty() ? 1.0 : double{model.rope_factors()[Index(i)]};
    frequencies_.push_back(std::pow(shape_.rope_base, -2.0 * i / shape_.rope_dims) / factor /
                           shape_.rope_scale);
  }
}

void LlamaRank::RequireTokens(std::span<const Token> tokens) const {
  for (const Token token : tokens) {
    Require(token >= 0 && token < shape_.vocabulary, "token ", token,
            " is none of this model; there are ", shape_.vocabulary);
  }
}

void LlamaRank::RequireRoom(std::span<const Next> grown, std::int64_t tokens) {
  std::int64_t pages = 0;
  for (const Next& next : grown) pages += cache_.PagesToGrow(next.id, tokens);
  std::int32_t full = pages > cache_.free_pages() ? 1 : 0;
  std::int32_t scratch = 0;
  RunCollective(comm_, [&] {
    AllReduce(comm_, std::as_writable_bytes(std::span(&full, 1)),
              std::as_writable_bytes(std::span(&scratch, 1)), [](Bytes mine, ConstBytes theirs) {
                for (std::size_t i = 0; i < mine.size(); ++i) mine[i] |= theirs[i];
              });
  });
  Require(full == 0, "there is no room for ", tokens, " more tokens in ", grown.size(),
          " sequences: the context holds ", options_.tokens, " tokens");
}

void LlamaRank::RequireRoomFor(SequenceId id, std::int64_t tokens) {
  const Next grown{id, 0};
  RequireRoom(std::span(&grown, 1), tokens);
}

std::int64_t LlamaRank::DefaultChunk() const {
  // Weights are widened once a chunk, so a rank should have many tokens of it; their activations
  // should not take much of what the machine has, be all ranks on it.
  constexpr std::int64_t kBytes = 192 << 20;
  constexpr std::int64_t kLeast = 128;
  constexpr std::int64_t kMost = 1024;
  const std::int64_t floats = 3 * std::int64_t{shape_.width} + qkv_rows_ +
                              std::int64_t{2} * shape_.ffn +
                              std::int64_t{shape_.heads} * (shape_.v_head_dim + 1) +
                              shape_.rope_dims + shape_.ffn;  // rounded
  const std::int64_t fit = kBytes / comm_.size() / (floats * std::int64_t{sizeof(float)});
  return std::clamp(fit, kLeast, kMost) * comm_.size();
}

void LlamaRank::Resize(std::int64_t tokens) {
  const auto resize = [&](std::vector<float>& values, std::int64_t n) {
    values.resize(std::max(values.size(), Index(tokens * n)));
  };
  resize(rows_.x, shape_.width);
  resize(rows_.normed, shape_.width);
  resize(rows_.qkv, qkv_rows_);
  resize(rows_.attended, std::int64_t{shape_.heads} * shape_.v_head_dim);
  resize(rows_.lse, shape_.heads);
  resize(rows_.gate, shape_.ffn);
  resize(rows_.up, shape_.ffn);
  resize(rows_.added, shape_.width);
  resize(rows_.cosines, shape_.rope_dims / 2);
  resize(rows_.sines, shape_.rope_dims / 2);
}

void LlamaRank::Embed(std::int64_t row, Token token, std::int64_t position) {
  model_.embedding().Read(token, &rows_.x[Index(row * shape_.width)]);
  const std::int64_t pairs = shape_.rope_dims / 2;
  for (std::int64_t i = 0; i < pairs; ++i) {
    const double angle = static_cast<double>(position) * frequencies_[Index(i)];
    rows_.cosines[Index(row * pairs + i)] = static_cast<float>(std::cos(angle));
    rows_.sines[Index(row * pairs + i)] = static_cast<float>(std::sin(angle));
  }
}

SlotRange LlamaRank::ShareOf(int rank, std::int64_t rows) const {
  const std::int64_t n = comm_.size();
  return {rows * rank / n, rows * (rank + 1) / n};
}

void LlamaRank::Gather(float* values, std::int64_t tokens, std::int64_t n) {
  if (comm_.size() == 1) return;
  // One token: shares lie where they belong. More: packed in scratch, rank after rank.
  float* base = values;
  if (tokens > 1) {
    scratch_.resize(std::max(scratch_.size(), Index(tokens * n)));
    base = scratch_.data();
  }
  std::vector<Bytes> parts;
  for (int r = 0; r < comm_.size(); ++r) {
    const SlotRange share = ShareOf(r, n);
    parts.push_back(std::as_writable_bytes(
        std::span(base + tokens * share.begin, Index(tokens * share.size()))));
  }
  const auto copy_part = [&](int r, bool pack) {
    const SlotRange share = ShareOf(r, n);
    for (std::int64_t t = 0; t < tokens; ++t) {
      float* in_place = values + t * n + share.begin;
      float* packed = base + tokens * share.begin + t * share.size();
      std::copy_n(pack ? in_place : packed, share.size(), pack ? packed : in_place);
    }
  };
  if (tokens > 1) copy_part(comm_.rank(), true);
  AllGather(comm_, {parts[Index(comm_.rank())]}, parts);
  for (int r = 0; tokens > 1 && r < comm_.size(); ++r) {
    if (r != comm_.rank()) copy_part(r, false);
  }
}

void LlamaRank::WriteKeys(SequenceId id, int layer, SlotRange slots, std::int64_t row) {
  if (slots.begin == slots.end) return;
  const float* qkv = &rows_.qkv[Index(row * qkv_rows_)];
  TensorView k = TensorView::Dense(qkv + q_rows_, DType::kF32, slots.end - slots.begin,
                                   shape_.kv_heads, shape_.head_dim);
  TensorView v = TensorView::Dense(qkv + q_rows_ + k_rows_, DType::kF32, slots.end - slots.begin,
                                   shape_.kv_heads, shape_.v_head_dim);
  k.token_stride = v.token_stride = qkv_rows_ * static_cast<std::int64_t>(sizeof(float));
  cache_.Write(id, layer, slots, k, v);
}

void LlamaRank::PrefillAttention(SequenceId id, int layer, SlotRange own, std::int64_t first) {
  const std::int64_t count = own.end - own.begin;
  const std::vector<Positions> shards = cache_.shards(id);
  std::vector<Positions> queries;
  std::int64_t most_queries = 0;
  for (const Positions& shard : shards) {
    const std::int64_t begin = shard.CountBelow(first);
    const std::int64_t tokens = shard.count() - begin;
    queries.push_back(
        tokens == 0
            ? Positions()
            : Positions::Strided(
                  {.first = shard[begin], .run = 1, .stride = comm_.size(), .count = tokens}));
    most_queries = std::max(most_queries, tokens);
  }
  TensorView q =
      TensorView::Dense(rows_.qkv.data(), DType::kF32, count, shape_.heads, shape_.head_dim);
  q.token_stride = qkv_rows_ * static_cast<std::int64_t>(sizeof(float));
  const ShardedTask task{
      .local = {.q = q,
                .q_positions = queries[Index(comm_.rank())],
                .kv = cache_.View(id, layer),
                .kv_positions = shards[Index(comm_.rank())],
                .result = {std::span(rows_.attended)
                               .first(Index(count * shape_.heads * shape_.v_head_dim)),
                           std::span(rows_.lse).first(Index(count * shape_.heads)),
                           shape_.v_head_dim}},
      .kv_shards = shards,
      .q_shards = queries};
  // What goes round is what has fewer bytes: keys and values, or queries with their partials.
  const std::int64_t kv_bytes =
      cache_.length(id) / comm_.size() * shape_.kv_heads *
      static_cast<std::int64_t>(RowBytes(options_.kv_type, shape_.head_dim) +
                                RowBytes(options_.kv_type, shape_.v_head_dim));
  const std::int64_t q_bytes =
      most_queries * shape_.heads * 4 * (shape_.head_dim + shape_.v_head_dim + 1);
  treeline::Prefill(comm_, backend_, spec_, std::span(&task, 1),
                    q_bytes < kv_bytes ? Schedule::kRingQ : Schedule::kRingKv);
}

void LlamaRank::PrefillChunk(SequenceId id, std::span<const Token> tokens) {
  const std::int64_t first = cache_.length(id);
  const SlotRange own = cache_.Grow(id, static_cast<std::int64_t>(tokens.size()));
  const std::int64_t count = own.end - own.begin;
  Resize(count);
  const Positions positions = cache_.positions(id);
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t position = positions[own.begin + i];
    Embed(i, tokens[Index(position - first)], position);
  }
  const int width = shape_.width;
  const bool few = static_cast<std::int64_t>(tokens.size()) <= Linear::kFewTokens;
  const cpu::Rotation rotation{rows_.cosines.data(), rows_.sines.data(), shape_.rope_dims / 2};
  const auto all_rows = [](const Matrix& matrix, float* out, std::int64_t stride) {
    return Product{&matrix, 0, matrix.rows, out, stride};
  };
  const auto multiply = [&](const std::vector<float>& x, std::span<const Product> products) {
    linear_.Multiply(products, x.data(), count, few);
  };
  const auto add = [&] {
    backend_.Add(std::span(rows_.x).first(Index(count * width)),
                 std::span(rows_.added).first(Index(count * width)));
  };
  for (int l = 0; l < shape_.layers; ++l) {
    const LlamaLayer& layer = model_.layers()[Index(l)];
    cpu::RmsNorm(context_, rows_.x.data(), layer.attention_norm.data(), count, width,
                 shape_.epsilon, rows_.normed.data());
    multiply(rows_.normed,
             std::array{all_rows(layer.q, rows_.qkv.data(), qkv_rows_),
                        all_rows(layer.k, rows_.qkv.data() + q_rows_, qkv_rows_),
                        all_rows(layer.v, rows_.qkv.data() + q_rows_ + k_rows_, qkv_rows_)});
    cpu::Rotate(context_, rotation, rows_.qkv.data(), qkv_rows_, count,
                shape_.heads + shape_.kv_heads, shape_.head_dim);
    WriteKeys(id, l, own, 0);
    PrefillAttention(id, l, own, first);
    multiply(rows_.attended, std::array{all_rows(layer.output, rows_.added.data(), width)});
    add();
    cpu::RmsNorm(context_, rows_.x.data(), layer.ffn_norm.data(), count, width, shape_.epsilon,
                 rows_.normed.data());
    multiply(rows_.normed, std::array{all_rows(layer.gate, rows_.gate.data(), shape_.ffn),
                                      all_rows(layer.up, rows_.up.data(), shape_.ffn)});
    cpu::SwiGlu(context_, rows_.gate.data(), rows_.up.data(), count, shape_.ffn);
    multiply(rows_.gate, std::array{all_rows(layer.down, rows_.added.data(), width)});
    add();
  }
}

std::int64_t LlamaRank::Run(SequenceId id, std::span<const Token> tokens,
                            const Visit& after_chunk) {
  RequireTokens(tokens);
  comm_.SetStep("prefill", model_.fingerprint());
  RequireRoomFor(id, static_cast<std::int64_t>(tokens.size()));
  const auto total = static_cast<std::int64_t>(tokens.size());
  std::int64_t done = 0;
  RunCollective(comm_, [&] {
    for (bool go_on = true; go_on && done < total;) {
      const std::int64_t count = std::min(chunk_, total - done);
      PrefillChunk(id, tokens.subspan(Index(done), Index(count)));
      go_on = after_chunk(done, count);
      done += count;
    }
  });
  return done;
}

std::int64_t LlamaRank::Prefill(SequenceId id, std::span<const Token> tokens,
                                std::span<float> logits,
                                const std::function<bool(std::int64_t done)>& go_on) {
  Require(!tokens.empty(), "there is no token to prefill");
  return Run(id, tokens, [&](std::int64_t begin, std::int64_t count) {
    if (go_on && !go_on(begin + count)) return false;
    if (logits.empty() || begin + count < static_cast<std::int64_t>(tokens.size())) return true;
    // The last token's rank has its row, the last one there; all need it.
    const std::int64_t last = cache_.length(id) - 1;
    const int owner = static_cast<int>((cache_.first_rank(id) + last) % comm_.size());
    if (owner == comm_.rank()) {
      const std::int64_t own = cache_.positions(id).count();
      const std::int64_t row = own - 1 - cache_.positions(id).CountBelow(last + 1 - count);
      std::copy_n(&rows_.x[Index(row * shape_.width)], shape_.width, rows_.x.data());
    } else {
      Resize(1);
    }
    Broadcast(comm_, owner, std::as_writable_bytes(std::span(rows_.x).first(Index(shape_.width))));
    Logits(1, logits);
    return true;
  });
}

void LlamaRank::Logits(std::int64_t tokens, std::span<float> logits) {
  Resize(tokens);
  cpu::RmsNorm(context_, rows_.x.data(), model_.output_norm().data(), tokens, shape_.width,
               shape_.epsilon, rows_.normed.data());
  const std::int64_t n = shape_.vocabulary;
  const SlotRange share = OwnShare(n);
  const Product head{&model_.head(), share.begin, share.end, logits.data() + share.begin, n};
  linear_.Multiply({&head, 1}, rows_.normed.data(), tokens, tokens <= Linear::kFewTokens);
  GatherToFirst(logits, tokens);
}

void LlamaRank::GatherToFirst(std::span<float> logits, std::int64_t tokens) {
  if (comm_.size() == 1) return;
  const std::int64_t n = shape_.vocabulary;
  for (std::int64_t t = 0; t < tokens; ++t) {
    std::vector<Bytes> parts;
    for (int r = 0; r < comm_.size(); ++r) {
      const SlotRange share = ShareOf(r, n);
      parts.push_back(
          std::as_writable_bytes(logits.subspan(Index(t * n + share.begin), Index(share.size()))));
    }
    GatherTo(comm_, 0, parts[Index(comm_.rank())], parts);
  }
}

double LlamaRank::LogLikelihood(SequenceId id, std::span<const Token> tokens, std::int64_t begin,
                                const std::function<void(std::int64_t done)>& done) {
  Require(tokens.size() >= 2, "there are ", tokens.size(), " tokens; 2 are needed");
  const std::int64_t start = cache_.length(id);
  double sum = 0.0;
  constexpr std::int64_t kBlock = 64;  // tokens whose logits are held at a time
  std::vector<float> logits;
  Run(id, tokens, [&](std::int64_t chunk_begin, std::int64_t count) {
    const Positions positions = cache_.positions(id);
    const std::int64_t first = positions.CountBelow(start + chunk_begin);
    const std::int64_t own = positions.count() - first;
    for (std::int64_t row = 0; row < own; row += kBlock) {
      const std::int64_t rows = std::min(kBlock, own - row);
      logits.resize(Index(kBlock * shape_.vocabulary));
      cpu::RmsNorm(context_, &rows_.x[Index(row * shape_.width)], model_.output_norm().data(), rows,
                   shape_.width, shape_.epsilon, rows_.normed.data());
      const Product head{&model_.head(), 0, shape_.vocabulary, logits.data(), shape_.vocabulary};
      linear_.Multiply({&head, 1}, rows_.normed.data(), rows, /*few=*/false);
      for (std::int64_t r = 0; r < rows; ++r) {
        const std::int64_t token = positions[first + row + r] - start;
        if (token < begin || token + 1 >= static_cast<std::int64_t>(tokens.size())) continue;
        const std::span<const float> of_row =
            std::span(logits).subspan(Index(r * shape_.vocabulary), Index(shape_.vocabulary));
        const float highest = *std::ranges::max_element(of_row);
        double total = 0.0;
        for (const float value : of_row) total += std::exp(double{value} - double{highest});
        sum += double{of_row[Index(tokens[Index(token + 1)])]} - highest - std::log(total);
      }
    }
    if (done) done(chunk_begin + count);
    return true;
  });
  double scratch = 0.0;
  AllReduce(comm_, std::as_writable_bytes(std::span(&sum, 1)),
            std::as_writable_bytes(std::span(&scratch, 1)), [](Bytes mine, ConstBytes theirs) {
              std::array<double, 2> values{};
              std::memcpy(values.data(), mine.data(), sizeof(double));
              std::memcpy(&values[1], theirs.data(), sizeof(double));
              values[0] += values[1];
              std::memcpy(mine.data(), values.data(), sizeof(double));
            });
  return sum;
}

void LlamaRank::DecodeLayer(std::span<const Growing> sequences, int index) {
  const LlamaLayer& layer = model_.layers()[Index(index)];
  const auto count = static_cast<std::int64_t>(sequences.size());
  const int width = shape_.width;
  const bool few = count <= Linear::kFewTokens;
  const auto own_rows = [&](const Matrix& matrix, std::vector<float>& out) {
    const SlotRange share = OwnShare(matrix.rows);
    return Product{&matrix, share.begin, share.end, out.data() + share.begin, matrix.rows};
  };
  const auto multiply = [&](const std::vector<float>& x, std::span<const Product> products) {
    linear_.Multiply(products, x.data(), count, few);
  };
  const auto add = [&] {
    Gather(rows_.added.data(), count, width);
    backend_.Add(std::span(rows_.x).first(Index(count * width)),
                 std::span(rows_.added).first(Index(count * width)));
  };
  cpu::RmsNorm(context_, rows_.x.data(), layer.attention_norm.data(), count, width, shape_.epsilon,
               rows_.normed.data());
  // The three matrices as one, so that shares are as equal as they can be.
  const SlotRange share = OwnShare(qkv_rows_);
  const auto of_share = [&](const Matrix& matrix, std::int64_t offset) {
    const std::int64_t begin = std::clamp<std::int64_t>(share.begin - offset, 0, matrix.rows);
    const std::int64_t end = std::clamp<std::int64_t>(share.end - offset, 0, matrix.rows);
    return Product{&matrix, begin, end, rows_.qkv.data() + offset + begin, qkv_rows_};
  };
  multiply(rows_.normed, std::array{of_share(layer.q, 0), of_share(layer.k, q_rows_),
                                    of_share(layer.v, q_rows_ + k_rows_)});
  Gather(rows_.qkv.data(), count, qkv_rows_);
  const cpu::Rotation rotation{rows_.cosines.data(), rows_.sines.data(), shape_.rope_dims / 2};
  cpu::Rotate(context_, rotation, rows_.qkv.data(), qkv_rows_, count,
              shape_.heads + shape_.kv_heads, shape_.head_dim);
  const std::int64_t out_rows = std::int64_t{shape_.heads} * shape_.v_head_dim;
  std::vector<ShardedTask> tasks;
  tasks.reserve(sequences.size());
  for (std::int64_t i = 0; i < count; ++i) {
    const auto& [id, slots, shards] = sequences[Index(i)];
    WriteKeys(id, index, slots, i);
    tasks.push_back(
        {.local =
             {.q = TensorView::Dense(&rows_.qkv[Index(i * qkv_rows_)], DType::kF32, 1, shape_.heads,
                                     shape_.head_dim),
              .q_positions = Positions::Contiguous(cache_.length(id) - 1, 1),
              .kv = cache_.View(id, index),
              .kv_positions = shards[Index(comm_.rank())],
              .result = {std::span(rows_.attended).subspan(Index(i * out_rows), Index(out_rows)),
                         std::span(rows_.lse).subspan(Index(i * shape_.heads), Index(shape_.heads)),
                         shape_.v_head_dim}},
         .kv_shards = shards});
  }
  treeline::Decode(comm_, backend_, spec_, tasks,
                   {.schedule = schedule_,
                    .node_size = options_.node_size,
                    .reproducible = options_.reproducible});
  multiply(rows_.attended, std::array{own_rows(layer.output, rows_.added)});
  add();
  cpu::RmsNorm(context_, rows_.x.data(), layer.ffn_norm.data(), count, width, shape_.epsilon,
               rows_.normed.data());
  multiply(rows_.normed,
           std::array{own_rows(layer.gate, rows_.gate), own_rows(layer.up, rows_.up)});
  const SlotRange own = OwnShare(shape_.ffn);
  for (std::int64_t t = 0; t < count; ++t) {
    float* gate = rows_.gate.data() + t * shape_.ffn + own.begin;
    cpu::SwiGlu(context_, gate, rows_.up.data() + t * shape_.ffn + own.begin, 1,
                static_cast<int>(own.end - own.begin));
  }
  Gather(rows_.gate.data(), count, shape_.ffn);
  multiply(rows_.gate, std::array{own_rows(layer.down, rows_.added)});
  add();
}

void LlamaRank::Decode(std::span<const Next> next, std::span<float> logits) {
  Require(!next.empty(), "there is no sequence to decode");
  Require(logits.size() == next.size() * Index(shape_.vocabulary), "there are ", logits.size(),
          " logits; ", next.size(), " sequences have ", next.size() * Index(shape_.vocabulary));
  for (const Next& each : next) RequireTokens(std::span(&each.token, 1));
  comm_.SetStep("decode", model_.fingerprint());
  RequireRoom(next, 1);
  RunCollective(comm_, [&] {
    Resize(static_cast<std::int64_t>(next.size()));
    std::vector<Growing> sequences;
    sequences.reserve(next.size());
    for (std::size_t i = 0; i < next.size(); ++i) {
      const auto& [id, token] = next[i];
      const std::int64_t position = cache_.length(id);
      const SlotRange slots = cache_.Grow(id, 1);
      sequences.push_back({id, slots, cache_.shards(id)});
      Embed(static_cast<std::int64_t>(i), token, position);
    }
    for (int l = 0; l < shape_.layers; ++l) DecodeLayer(sequences, l);
    Logits(static_cast<std::int64_t>(next.size()), logits);
  });
}

}  // namespace treeline::model
