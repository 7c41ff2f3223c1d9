#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "model/linear.h"
#include "model/llama_model.h"
#include "treeline/backend.h"
#include "treeline/comm.h"
#include "treeline/kv_cache.h"
#include "treeline/schedule.h"

namespace treeline::model {

using Token = std::int32_t;

struct LlamaOptions {
  DType kv_type = DType::kF16;
  Activations activations = Activations::kI16;
  Schedule schedule = Schedule::kTree;  // of decoding
  int node_size = 0;                    // as in DecodeOptions
  bool reproducible = false;            // likewise
  bool int8_queries = false;            // as in AttentionSpec
  std::int64_t tokens = 4096;           // that the cache holds at most, of all sequences and ranks
  int sequences = 1;                    // that it holds at a time
  std::int64_t chunk = 0;  // tokens of all ranks that are prefilled at a time; 0: as memory allows
};

// One rank's part of a model at work: its shard of the keys and values, and its share of the
// computation. All ranks make the same calls with the same arguments.
//
// Prefill: every rank computes its own tokens, with all weights; tokens are striped, so all ranks
// have as many, and keys lie where decoding will read them. Decoding: the rows of every matrix are
// divided over the ranks, and partial results are exchanged: 4 gathers and a reduction a layer.
class LlamaRank {
 public:
  // Borrows the model, the communicator and what is in the context. Throws ArgumentError for
  // options out of range.
  LlamaRank(const LlamaModel& model, Communicator& comm, const Context& context,
            const LlamaOptions& options);

  const LlamaModel& model() const { return model_; }
  // Tokens that all sequences may have together.
  std::int64_t context() const { return options_.tokens; }
  // How decoding shares attention from now on. The same on all ranks.
  void set_schedule(Schedule schedule) { schedule_ = schedule; }
  // Its sequences; their tokens come and go by the calls below, or by Free, Fork and Truncate.
  KvCache& cache() { return cache_; }
  const KvCache& cache() const { return cache_; }

  // Appends tokens to a sequence. `logits`, [vocabulary] or empty, become those of what follows the
  // last one, on rank 0. `go_on` is called with the tokens that have been computed, after each
  // chunk; if it returns false, on all ranks, the rest is left out. Returns the tokens that were
  // computed. Throws ArgumentError if a token is none of the vocabulary or the cache has no room;
  // nothing has changed then. Collective.
  std::int64_t Prefill(SequenceId id, std::span<const Token> tokens, std::span<float> logits,
                       const std::function<bool(std::int64_t done)>& go_on = {});

  // As Prefill; returns the sum of log p(tokens[i + 1]) over i in [begin, tokens.size() - 1), on
  // all ranks.
  double LogLikelihood(SequenceId id, std::span<const Token> tokens, std::int64_t begin,
                       const std::function<void(std::int64_t done)>& done = {});

  // Throws ArgumentError, on all ranks alike, unless every rank has room for so many more tokens of
  // a sequence. Collective.
  void RequireRoomFor(SequenceId id, std::int64_t tokens);

  struct Next {
    SequenceId id;
    Token token;
  };
  // Appends one token to each of some sequences. `logits`, [sequences, vocabulary], become those of
  // what follows, on rank 0. As Prefill otherwise.
  void Decode(std::span<const Next> next, std::span<float> logits);

 private:
  struct Rows {                   // activations of some tokens
    std::vector<float> x;         // [tokens, width]: the residual stream
    std::vector<float> normed;    // [tokens, width]
    std::vector<float> qkv;       // [tokens, q, k and v]
    std::vector<float> attended;  // [tokens, heads * v_head_dim]
    std::vector<float> lse;       // [tokens, heads]
    std::vector<float> gate;      // [tokens, ffn]
    std::vector<float> up;        // [tokens, ffn]
    std::vector<float> added;     // [tokens, width]
    std::vector<float> cosines;   // [tokens, pairs]
    std::vector<float> sines;     // [tokens, pairs]
  };
  struct Growing {  // a sequence to which a token has been appended
    SequenceId id;
    SlotRange slots;  // of the token here; empty on other ranks
    std::vector<Positions> shards;
  };
  using Visit = std::function<bool(std::int64_t first, std::int64_t count)>;

  void RequireTokens(std::span<const Token> tokens) const;
  // Throws, on all ranks alike, unless every rank has room.
  void RequireRoom(std::span<const Next> grown, std::int64_t tokens);
  // Tokens of all ranks that are prefilled at a time, if the options do not say it.
  std::int64_t DefaultChunk() const;
  void Resize(std::int64_t tokens);
  void Embed(std::int64_t row, Token token, std::int64_t position);
  // One chunk of a sequence: this rank's tokens of it.
  void PrefillChunk(SequenceId id, std::span<const Token> tokens);
  void PrefillAttention(SequenceId id, int layer, SlotRange own, std::int64_t first);
  void DecodeLayer(std::span<const Growing> sequences, int layer);
  void WriteKeys(SequenceId id, int layer, SlotRange slots, std::int64_t row);
  // Rows of matrices that a rank multiplies, of `rows`.
  SlotRange ShareOf(int rank, std::int64_t rows) const;
  SlotRange OwnShare(std::int64_t rows) const { return ShareOf(comm_.rank(), rows); }
  // values [tokens, n], of which this rank has computed its share: all ranks get all of it.
  void Gather(float* values, std::int64_t tokens, std::int64_t n);
  // logits [tokens, vocabulary], of which this rank has computed its share: rank 0 gets all.
  void GatherToFirst(std::span<float> logits, std::int64_t tokens);
  // The head of rows of x that all ranks have.
  void Logits(std::int64_t tokens, std::span<float> logits);
  // Computes chunks of tokens as long as `after_chunk` returns true; returns how many they were.
  std::int64_t Run(SequenceId id, std::span<const Token> tokens, const Visit& after_chunk);

  const LlamaModel& model_;
  const LlamaShape& shape_;
  Communicator& comm_;
  const Context context_;
  const LlamaOptions options_;
  Schedule schedule_;
  const AttentionSpec spec_;
  const std::int64_t q_rows_;  // of the matrix of queries
  const std::int64_t k_rows_;
  const std::int64_t qkv_rows_;
  const std::int64_t chunk_;
  CpuBackend backend_;
  Linear linear_;
  KvCache cache_;
  std::vector<double> frequencies_;  // [pairs]
  Rows rows_;
  std::vector<float> scratch_;  // of Gather
};

}  // namespace treeline::model
