#pragma once

#include <functional>
#include <string>

#include "cli/ranks.h"
#include "model/generator.h"
#include "model/vocabulary.h"

namespace treeline::cli {

// What commands that run a model have in common.
struct ModelOptions {
  std::string file;
  std::vector<int> ranks;    // one number, or none: 1, or mpirun's
  int threads = 0;           // of a rank; 0: all cores, divided among the ranks of this host
  std::int64_t context = 0;  // tokens; 0: as many as are needed
  std::string kv_type = "f16";
  std::string schedule = "tree";
  std::string activations = "i16";
  int node_size = 0;
  bool reproducible = false;
  bool int8_queries = false;
  RankOptions where;
};
void AddModelOptions(CLI::App& command, ModelOptions& options);

void AddSamplingOptions(CLI::App& command, model::SamplerOptions& options);

// What a rank has to work with.
struct ModelRank {
  Communicator& comm;
  model::LlamaRank& llama;
  model::Generator& generator;
};

// A model that is open, and the ranks that will run it.
class ModelRun {
 public:
  // Joins the ranks, opens the file and checks the options; all ranks.
  explicit ModelRun(const ModelOptions& options);

  const model::LlamaModel& model() const { return model_; }
  const model::Vocabulary& vocabulary() const { return vocabulary_; }
  int ranks() const { return ranks_; }
  int threads() const { return threads_; }
  std::int64_t context() const { return context_; }

  // A context that was not given becomes as large as is needed, if the model has it.
  void Need(std::int64_t tokens);

  // Calls body on every rank, with a cache for so many sequences.
  void Run(int sequences, const std::function<void(ModelRank&)>& body);

 private:
  const ModelOptions options_;
  const int ranks_;
  const int threads_;
  const model::LlamaModel model_;
  const model::Vocabulary vocabulary_;
  std::int64_t context_;
};

// Tokens that rank 0 knows, on all ranks. Collective.
std::vector<model::Token> Share(Communicator& comm, std::vector<model::Token> tokens);

}  // namespace treeline::cli
