// A model over ranks computes what it computes on one, and what plain loops in float64 do.

#include "model/llama_rank.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <random>

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

// Logits after the last token, by the definition of a Llama.
std::vector<double> Reference(const LlamaModel& model, const std::vector<Token>& tokens) {
  const LlamaShape& s = model.shape();
  const std::size_t n = tokens.size();
  const auto width = static_cast<std::size_t>(s.width);
  const auto multiply = [](const Matrix& matrix, const std::vector<double>& x) {
    const std::vector<double> w = WidenMatrix(matrix);
    std::vector<double> out;
    for (std::size_t r = 0; r < static_cast<std::size_t>(matrix.rows); ++r) {
      out.push_back(std::inner_product(x.begin(), x.end(),
                                       w.begin() + static_cast<std::ptrdiff_t>(r * x.size()), 0.0));
    }
    return out;
  };
  const auto norm = [&](const std::vector<double>& x, std::span<const float> weight) {
    double squares = 0.0;
    for (const double v : x) squares += v * v;
    const double scale = 1.0 / std::sqrt(squares / static_cast<double>(x.size()) + s.epsilon);
    std::vector<double> out;
    for (std::size_t i = 0; i < x.size(); ++i) out.push_back(x[i] * scale * weight[i]);
    return out;
  };
  const auto rotate = [&](std::vector<double>& x, int heads, std::size_t position) {
    for (int h = 0; h < heads; ++h) {
      for (int i = 0; i < s.rope_dims / 2; ++i) {
        const double angle =
            static_cast<double>(position) * std::pow(s.rope_base, -2.0 * i / s.rope_dims);
        double& a = x[static_cast<std::size_t>(h * s.head_dim + 2 * i)];
        double& b = x[static_cast<std::size_t>(h * s.head_dim + 2 * i + 1)];
        const double rotated = a * std::cos(angle) - b * std::sin(angle);
        b = a * std::sin(angle) + b * std::cos(angle);
        a = rotated;
      }
    }
  };
  std::vector<std::vector<double>> x(n);
  std::vector<float> row(width);
  for (std::size_t t = 0; t < n; ++t) {
    model.embedding().Read(tokens[t], row.data());
    x[t].assign(row.begin(), row.end());
  }
  for (const LlamaLayer& layer : model.layers()) {
    std::vector<std::vector<double>> q;
    std::vector<std::vector<double>> k;
    std::vector<std::vector<double>> v;
    for (std::size_t t = 0; t < n; ++t) {
      const std::vector<double> normed = norm(x[t], layer.attention_norm);
      rotate(q.emplace_back(multiply(layer.q, normed)), s.heads, t);
      rotate(k.emplace_back(multiply(layer.k, normed)), s.kv_heads, t);
      v.push_back(multiply(layer.v, normed));
    }
    for (std::size_t t = 0; t < n; ++t) {
      std::vector<double> attended;
      for (int h = 0; h < s.heads; ++h) {
        const int g = h / (s.heads / s.kv_heads);
        std::vector<double> weights;
        for (std::size_t u = 0; u <= t; ++u) {
          double score = 0.0;
          for (int d = 0; d < s.head_dim; ++d) {
            score += q[t][static_cast<std::size_t>(h * s.head_dim + d)] *
                     k[u][static_cast<std::size_t>(g * s.head_dim + d)];
          }
          weights.push_back(std::exp(score / std::sqrt(s.head_dim)));
        }
        const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
        for (int d = 0; d < s.v_head_dim; ++d) {
          double sum = 0.0;
          for (std::size_t u = 0; u <= t; ++u) {
            sum += weights[u] * v[u][static_cast<std::size_t>(g * s.v_head_dim + d)];
          }
          attended.push_back(sum / total);
        }
      }
      const std::vector<double> added = multiply(layer.output, attended);
      for (std::size_t i = 0; i < width; ++i) x[t][i] += added[i];
      const std::vector<double> normed = norm(x[t], layer.ffn_norm);
      std::vector<double> gate = multiply(layer.gate, normed);
      const std::vector<double> up = multiply(layer.up, normed);
      for (std::size_t i = 0; i < gate.size(); ++i) gate[i] *= up[i] / (1.0 + std::exp(-gate[i]));
      const std::vector<double> down = multiply(layer.down, gate);
      for (std::size_t i = 0; i < width; ++i) x[t][i] += down[i];
    }
  }
  return multiply(model.head(), norm(x.back(), model.output_norm()));
}

struct Ranks {
  int ranks = 1;
  int threads = 1;
  LlamaOptions options = {.kv_type = DType::kF32, .activations = Activations::kF32};
};

// Runs body(rank's engine, its communicator) on all ranks.
template <class Body>
void OnRanks(const LlamaModel& model, const Ranks& ranks_of, const Body& body) {
  RunRanks({.ranks = ranks_of.ranks}, [&](Communicator& comm) {
    ThreadPool pool(ranks_of.threads);
    LlamaRank rank(model, comm, {.pool = &pool, .poll = ProgressOf(comm)}, ranks_of.options);
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
    const std::vector<double> want = Reference(model, tokens);
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
  const std::vector<Token> more = RandomTokens(5, model.shape().vocabulary, 2);
  const std::vector<float> want = LogitsOf(model, {}, prompt, more);
  for (const int ranks : {1, 3, 4}) {
    for (const std::int64_t chunk : {1, 7, 100, 1000}) {
      if (chunk == 1 && ranks > 1) continue;  // slow, and no other than 7
      Ranks ranks_of{.ranks = ranks, .threads = 2};
      ranks_of.options.chunk = chunk;
      EXPECT_LT(MaxDifference(LogitsOf(model, ranks_of, prompt, more), want), 1e-4)
          << ranks << " ranks, chunks of " << chunk;
    }
    for (const Schedule schedule : kDecodeSchedules) {
      Ranks ranks_of{.ranks = ranks};
      ranks_of.options.schedule = schedule;
      ranks_of.options.node_size = 2;
      EXPECT_LT(MaxDifference(LogitsOf(model, ranks_of, prompt, more), want), 1e-4)
          << ranks << " ranks, " << Name(schedule);
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
  double want = 0.0;
  for (std::size_t i = 5; i + 1 < tokens.size(); ++i) {
    const std::vector<double> logits =
        Reference(model, {tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(i) + 1});
    double total = 0.0;
    for (const double logit : logits) total += std::exp(logit);
    want += logits[static_cast<std::size_t>(tokens[i + 1])] - std::log(total);
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
