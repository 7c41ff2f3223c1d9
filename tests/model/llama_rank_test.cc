// A model over ranks computes what it computes on one, and what plain loops in float64 do.

#include "model/llama_rank.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <optional>
#include <random>

#include "kernels/cpu/kernel_table.h"
#include "model/tiny_model.h"
#include "treeline/errors.h"
#include "treeline/thread_pool.h"

namespace treeline::model {
namespace {

using test::TinyModel;

std::vector<Token> RandomTokens(std::size_t count, int vocabulary, unsigned seed = 1) {
  std::mt19937 random(seed);
  std::vector<Token> tokens(count);
  for (Token& token : tokens)
    token = static_cast<Token>(random() % static_cast<unsigned>(vocabulary));
  return tokens;
}

std::vector<double> WidenMatrix(const Matrix& matrix) {
  std::vector<double> wide;
  std::vector<float> row(static_cast<std::size_t>(matrix.columns));
  for (std::int64_t r = 0; r < matrix.rows; ++r) {
    matrix.Read(r, row.data());
    wide.insert(wide.end(), row.begin(), row.end());
  }
  return wide;
}

using Vectors = std::vector<std::vector<double>>;  // one a token

Vectors MultiplyAll(const Matrix& matrix, const Vectors& x) {
  const std::vector<double> wide = WidenMatrix(matrix);
  Vectors out;
  for (const std::vector<double>& token : x) {
    std::vector<double>& products = out.emplace_back();
    for (auto row = wide.begin(); row != wide.end(); row += matrix.columns) {
      products.push_back(std::inner_product(token.begin(), token.end(), row, 0.0));
    }
  }
  return out;
}

void AddAll(const Vectors& added, Vectors& x) {
  for (std::size_t t = 0; t < x.size(); ++t) {
    for (std::size_t i = 0; i < x[t].size(); ++i) x[t][i] += added[t][i];
  }
}

Vectors NormAll(const Vectors& x, std::span<const float> weight, double epsilon) {
  Vectors out = x;
  for (std::vector<double>& token : out) {
    const double squares = std::inner_product(token.begin(), token.end(), token.begin(), 0.0);
    const double scale = 1.0 / std::sqrt(squares / static_cast<double>(token.size()) + epsilon);
    for (std::size_t i = 0; i < token.size(); ++i) token[i] *= scale * weight[i];
  }
  return out;
}

void RotateAll(const LlamaShape& s, int heads, Vectors& x) {
  for (std::size_t position = 0; position < x.size(); ++position) {
    for (int h = 0; h < heads; ++h) {
      for (int i = 0; i < s.rope_dims / 2; ++i) {
        const double angle =
            static_cast<double>(position) * std::pow(s.rope_base, -2.0 * i / s.rope_dims);
        double& a = x[position][static_cast<std::size_t>(h * s.head_dim + 2 * i)];
        double& b = x[position][static_cast<std::size_t>(h * s.head_dim + 2 * i + 1)];
        const double rotated = a * std::cos(angle) - b * std::sin(angle);
        b = a * std::sin(angle) + b * std::cos(angle);
        a = rotated;
      }
    }
  }
}

Vectors AttendAll(const LlamaShape& s, const Vectors& q, const Vectors& k, const Vectors& v) {
  Vectors out(q.size());
  for (std::size_t t = 0; t < q.size(); ++t) {
    for (int h = 0; h < s.heads; ++h) {
      const int g = h / (s.heads / s.kv_heads);
      std::vector<double> weights;
      for (std::size_t u = 0; u <= t; ++u) {
        const double score =
            std::inner_product(&q[t][static_cast<std::size_t>(h * s.head_dim)],
                               &q[t][static_cast<std::size_t>(h * s.head_dim)] + s.head_dim,
                               &k[u][static_cast<std::size_t>(g * s.head_dim)], 0.0);
        weights.push_back(std::exp(score / std::sqrt(s.head_dim)));
      }
      const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
      for (int d = 0; d < s.v_head_dim; ++d) {
        double sum = 0.0;
        for (std::size_t u = 0; u <= t; ++u) {
          sum += weights[u] * v[u][static_cast<std::size_t>(g * s.v_head_dim + d)];
        }
        out[t].push_back(sum / total);
      }
    }
  }
  return out;
}

// Logits after each token, by the definition of a Llama.
Vectors Reference(const LlamaModel& model, const std::vector<Token>& tokens) {
  const LlamaShape& s = model.shape();
  Vectors x;
  std::vector<float> row(static_cast<std::size_t>(s.width));
  for (const Token token : tokens) {
    model.embedding().Read(token, row.data());
    x.emplace_back(row.begin(), row.end());
  }
  for (const LlamaLayer& layer : model.layers()) {
    const Vectors normed = NormAll(x, layer.attention_norm, s.epsilon);
    Vectors q = MultiplyAll(layer.q, normed);
    Vectors k = MultiplyAll(layer.k, normed);
    RotateAll(s, s.heads, q);
    RotateAll(s, s.kv_heads, k);
    AddAll(MultiplyAll(layer.output, AttendAll(s, q, k, MultiplyAll(layer.v, normed))), x);
    const Vectors normed_again = NormAll(x, layer.ffn_norm, s.epsilon);
    Vectors gate = MultiplyAll(layer.gate, normed_again);
    const Vectors up = MultiplyAll(layer.up, normed_again);
    for (std::size_t t = 0; t < x.size(); ++t) {
      for (std::size_t i = 0; i < gate[t].size(); ++i) {
        gate[t][i] *= up[t][i] / (1.0 + std::exp(-gate[t][i]));
      }
    }
    AddAll(MultiplyAll(layer.down, gate), x);
  }
  return MultiplyAll(model.head(), NormAll(x, model.output_norm(), s.epsilon));
}

struct Ranks {
  int ranks = 1;
  int threads = 1;
  std::optional<Isa> isa = {};
  LlamaOptions options = {.kv_type = DType::kF32, .activations = Activations::kF32};
};

// Runs body(rank's engine, its communicator) on all ranks.
template <class Body>
void OnRanks(const LlamaModel& model, const Ranks& ranks_of, const Body& body) {
  RunRanks({.ranks = ranks_of.ranks}, [&](Communicator& comm) {
    ThreadPool pool(ranks_of.threads);
    LlamaRank rank(model, comm, {.pool = &pool, .isa = ranks_of.isa, .poll = ProgressOf(comm)},
                   ranks_of.options);
    body(rank, comm);
  });
}

// Logits after `prompt` is prefilled and `more` are decoded, one by one.
std::vector<float> LogitsOf(const LlamaModel& model, const Ranks& ranks_of,
                            const std::vector<Token>& prompt, const std::vector<Token>& more) {
  std::vector<float> result;
  OnRanks(model, ranks_of, [&](LlamaRank& rank, Communicator& comm) {
    std::vector<float> logits(static_cast<std::size_t>(model.shape().vocabulary));
    const SequenceId id = rank.cache().Add(ranks_of.ranks - 1);
    if (!prompt.empty()) rank.Prefill(id, prompt, logits);
    for (const Token token : more) {
      const LlamaRank::Next next{id, token};
      rank.Decode(std::span(&next, 1), logits);
    }
    if (comm.rank() == 0) result = logits;
  });
  return result;
}

double MaxDifference(const std::vector<float>& a, const auto& b) {
  EXPECT_EQ(a.size(), b.size());
  double most = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    most = std::max(most, std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i])));
  }
  return most;
}

TEST(LlamaRankTest, MatchesPlainLoops) {
  for (const char* type : {"F32", "Q8_0", "Q4_1"}) {
    const TinyModel file(type);
    const LlamaModel model(file.path());
    const std::vector<Token> tokens = RandomTokens(21, model.shape().vocabulary);
    const std::vector<double> want = Reference(model, tokens).back();
    for (const int ranks : {1, 2, 3, 4, 8, 23}) {
      for (const std::size_t prompt :
           {std::size_t{0}, std::size_t{1}, std::size_t{14}, tokens.size()}) {
        SCOPED_TRACE(testing::Message() << type << ", " << ranks << " ranks, prompt of " << prompt);
        const std::vector<float> got =
            LogitsOf(model, {.ranks = ranks},
                     {tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(prompt)},
                     {tokens.begin() + static_cast<std::ptrdiff_t>(prompt), tokens.end()});
        EXPECT_LT(MaxDifference(got, want), 1e-4);
      }
    }
  }
}

TEST(LlamaRankTest, ChunksThreadsAndSchedulesDoNotMatter) {
  const TinyModel file;
  const LlamaModel model(file.path());
  const std::vector<Token> prompt = RandomTokens(333, model.shape().vocabulary);
  const std::vector<Token> start = RandomTokens(70, model.shape().vocabulary);
  const std::vector<Token> more = RandomTokens(5, model.shape().vocabulary, 2);
  const std::vector<float> after_prompt = LogitsOf(model, {}, prompt, more);
  const std::vector<float> after_start = LogitsOf(model, {}, start, more);
  for (const int ranks : {1, 3, 4}) {
    for (const std::int64_t chunk : {1, 7, 100, 1000}) {
      const bool few = chunk < 10;  // such chunks are slow
      Ranks ranks_of{.ranks = ranks, .threads = 2};
      ranks_of.options.chunk = chunk;
      EXPECT_LT(MaxDifference(LogitsOf(model, ranks_of, few ? start : prompt, more),
                              few ? after_start : after_prompt),
                1e-4)
          << ranks << " ranks, chunks of " << chunk;
    }
    for (const Schedule schedule : kDecodeSchedules) {  // which prefill does not know
      Ranks ranks_of{.ranks = ranks};
      ranks_of.options.schedule = schedule;
      ranks_of.options.node_size = 2;
      EXPECT_LT(MaxDifference(LogitsOf(model, ranks_of, start, more), after_start), 1e-4)
          << ranks << " ranks, " << Name(schedule);
    }
  }
}

// Every instruction set has its own way to multiply activations of many tokens.
TEST(LlamaRankTest, RoundedActivationsStayClose) {
  const TinyModel file;
  const LlamaModel model(file.path());
  const std::vector<Token> prompt = RandomTokens(100, model.shape().vocabulary);
  const std::vector<Token> more = RandomTokens(2, model.shape().vocabulary, 2);
  const std::vector<float> want = LogitsOf(model, {}, prompt, more);
  for (const Isa isa : cpu::TestedIsas()) {
    if (isa < Isa::kAvx2) continue;  // they multiply as it does
    for (const int ranks : {1, 3}) {
      Ranks ranks_of{.ranks = ranks, .isa = isa};
      ranks_of.options.activations = Activations::kI16;
      EXPECT_LT(MaxDifference(LogitsOf(model, ranks_of, prompt, more), want), 0.02)
          << Name(isa) << " on " << ranks << " ranks";
      ranks_of.options.activations = Activations::kBf16;
      if (ComputesInBf16(isa)) {
        EXPECT_LT(MaxDifference(LogitsOf(model, ranks_of, prompt, more), want), 0.2)
            << Name(isa) << " in bf16 on " << ranks << " ranks";
      } else {
        EXPECT_THROW(LogitsOf(model, ranks_of, prompt, more), ArgumentError) << Name(isa);
      }
    }
  }
}

// With 16-bit keys and activations the same computation is rounded in other places.
TEST(LlamaRankTest, RoundingStaysSmall) {
  const TinyModel file;
  const LlamaModel model(file.path());
  const std::vector<Token> prompt = RandomTokens(100, model.shape().vocabulary);
  const std::vector<Token> more = RandomTokens(5, model.shape().vocabulary, 2);
  const std::vector<float> want = LogitsOf(model, {}, prompt, more);
  for (const DType kv_type : {DType::kF32, DType::kBF16, DType::kF16, DType::kQ8_0}) {
    for (const int ranks : {1, 4}) {
      Ranks ranks_of{.ranks = ranks};
      ranks_of.options.kv_type = kv_type;
      ranks_of.options.activations = Activations::kI16;
      EXPECT_LT(MaxDifference(LogitsOf(model, ranks_of, prompt, more), want), 0.2)
          << Name(kv_type) << " on " << ranks << " ranks";
    }
  }
}

TEST(LlamaRankTest, ReproducibleDecodingHasTheSameBits) {
  const TinyModel file;
  const LlamaModel model(file.path());
  const std::vector<Token> tokens = RandomTokens(40, model.shape().vocabulary);
  std::vector<float> want;
  for (const int ranks : {1, 2, 4, 8}) {
    Ranks ranks_of{.ranks = ranks};
    ranks_of.options.reproducible = true;
    ranks_of.options.activations = Activations::kI16;
    // First rank 0: classes of keys depend on it.
    std::vector<float> got;
    OnRanks(model, ranks_of, [&](LlamaRank& rank, Communicator& comm) {
      std::vector<float> logits(static_cast<std::size_t>(model.shape().vocabulary));
      const SequenceId id = rank.cache().Add(0);
      for (const Token token : tokens) {
        const LlamaRank::Next next{id, token};
        rank.Decode(std::span(&next, 1), logits);
      }
      if (comm.rank() == 0) got = logits;
    });
    if (ranks == 1) want = got;
    EXPECT_EQ(got, want) << ranks << " ranks";
  }
}

TEST(LlamaRankTest, SequencesDoNotMixAndForksGoTheirOwnWays) {
  const TinyModel file;
  const LlamaModel model(file.path());
  const int vocabulary = model.shape().vocabulary;
  const std::vector<std::vector<Token>> texts{RandomTokens(50, vocabulary, 1),
                                              RandomTokens(7, vocabulary, 2),
                                              RandomTokens(23, vocabulary, 3)};
  for (const int ranks : {1, 2, 5}) {
    Ranks ranks_of{.ranks = ranks};
    ranks_of.options.sequences = 4;
    OnRanks(model, ranks_of, [&](LlamaRank& rank, Communicator& comm) {
      std::vector<LlamaRank::Next> next;
      for (const std::vector<Token>& text : texts) {
        const SequenceId id = rank.cache().Add();
        rank.Prefill(id, std::span(text).first(text.size() - 1), {});
        next.push_back({id, text.back()});
      }
      next.push_back({rank.cache().Fork(next[0].id), 5});
      std::vector<float> logits(next.size() * static_cast<std::size_t>(vocabulary));
      rank.Decode(next, logits);
      if (comm.rank() != 0) return;
      for (std::size_t i = 0; i < next.size(); ++i) {
        std::vector<Token> tokens = texts[i % texts.size()];
        tokens.back() = next[i].token;
        const auto begin = logits.begin() + static_cast<std::ptrdiff_t>(i) * vocabulary;
        EXPECT_LT(MaxDifference({begin, begin + vocabulary}, LogitsOf(model, {}, tokens, {})), 1e-4)
            << "sequence " << i << " on " << ranks << " ranks";
      }
    });
  }
}

TEST(LlamaRankTest, LogLikelihoodIsThatOfTheLogits) {
  const TinyModel file;
  const LlamaModel model(file.path());
  const std::vector<Token> tokens = RandomTokens(17, model.shape().vocabulary);
  const Vectors logits = Reference(model, tokens);
  double want = 0.0;
  for (std::size_t i = 5; i + 1 < tokens.size(); ++i) {
    double total = 0.0;
    for (const double logit : logits[i]) total += std::exp(logit);
    want += logits[i][static_cast<std::size_t>(tokens[i + 1])] - std::log(total);
  }
  for (const int ranks : {1, 3}) {
    OnRanks(model, {.ranks = ranks}, [&](LlamaRank& rank, Communicator&) {
      EXPECT_NEAR(rank.LogLikelihood(rank.cache().Add(), tokens, 5), want, 1e-3);
    });
  }
}

TEST(LlamaRankTest, RefusesWhatDoesNotFit) {
  const TinyModel file;
  const LlamaModel model(file.path());
  Ranks ranks_of{.ranks = 1};
  ranks_of.options.tokens = 300;
  OnRanks(model, ranks_of, [&](LlamaRank& rank, Communicator&) {
    std::vector<float> logits(static_cast<std::size_t>(model.shape().vocabulary));
    const SequenceId id = rank.cache().Add();
    EXPECT_THROW(rank.Prefill(id, {}, logits), ArgumentError);
    const std::vector<Token> many(2000, 1);
    EXPECT_THROW(rank.Prefill(id, many, logits), ArgumentError);
    EXPECT_EQ(rank.cache().length(id), 0);
  });
  OnRanks(model, ranks_of, [&](LlamaRank& rank, Communicator&) {
    std::vector<float> logits(static_cast<std::size_t>(model.shape().vocabulary));
    const SequenceId id = rank.cache().Add();
    const std::vector<Token> unknown{0, model.shape().vocabulary};
    EXPECT_THROW(rank.Prefill(id, unknown, logits), ArgumentError);
  });
}

}  // namespace
}  // namespace treeline::model
