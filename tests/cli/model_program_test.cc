// The commands that run a model, as a user meets them.

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "cli/run_program.h"
#include "model/gguf.h"
#include "model/mapped_file.h"
#include "model/tiny_model.h"

namespace {

namespace fs = std::filesystem;
using treeline::test::ExpectError;
using treeline::test::ExpectUsageError;
using treeline::test::Outcome;
using treeline::test::RunProgram;
using treeline::test::TinyModel;

class ModelProgramTest : public testing::Test {
 protected:
  ModelProgramTest() { fs::create_directories(folder_); }
  ~ModelProgramTest() override { fs::remove_all(folder_); }

  Outcome Run(const std::string& command, const std::string& arguments) {
    return RunProgram(command + " -m '" + model_.path() + "' " + arguments);
  }
  std::string WriteText(const std::string& name, const std::string& text) {
    const std::string path = (folder_ / name).string();
    std::ofstream(path, std::ios::binary) << text;
    return path;
  }

  const TinyModel model_;
  const fs::path folder_ =
      fs::temp_directory_path() / ("treeline-program-" + std::to_string(getpid()));
};

// Multiplies a norm's weights in a model's file.
void ScaleNorm(const std::string& path, const std::string& name, float factor) {
  const treeline::model::MappedFile file(path);
  const treeline::model::Gguf gguf(file.bytes(), path);
  const treeline::model::GgufTensor* tensor = gguf.FindTensor(name);
  ASSERT_NE(tensor, nullptr);
  std::vector<float> weights(tensor->data.size() / sizeof(float));
  std::memcpy(weights.data(), tensor->data.data(), tensor->data.size());
  for (float& weight : weights) weight *= factor;
  std::fstream stream(path, std::ios::binary | std::ios::in | std::ios::out);
  stream.seekp(tensor->data.data() - file.bytes().data());
  stream.write(reinterpret_cast<const char*>(weights.data()),
               static_cast<std::streamsize>(tensor->data.size()));
}

TEST_F(ModelProgramTest, KeysBeyondTheirTypeAreAnError) {
  ScaleNorm(model_.path(), "blk.0.attn_norm.weight", 1e7f);
  for (const char* ranks : {"1", "3"}) {
    const std::string arguments = std::string("-p a -n 2 --ranks ") + ranks;
    ExpectError(Run("generate", arguments), 1, "--kv-type f32 and bf16");
    EXPECT_EQ(Run("generate", arguments + " --kv-type bf16").code, 0);
  }
}

TEST_F(ModelProgramTest, TheTextDoesNotDependOnRanks) {
  const std::string same = "-p 'A text of some length' -n 30 --activations f32 --kv-type f32 ";
  const Outcome one = Run("generate", same);
  EXPECT_EQ(one.code, 0) << one.error;
  EXPECT_GT(one.output.size(), 30u);
  for (const char* ranks : {"2", "3", "4", "8"}) {
    const Outcome many = Run("generate", same + "--ranks " + ranks);
    EXPECT_EQ(many.code, 0) << many.error;
    EXPECT_EQ(many.output, one.output) << ranks << " ranks";
  }
  const std::string json = (folder_ / "report.json").string();
  EXPECT_EQ(Run("generate", same + "--ranks 2 --json " + json).output, one.output);
  const auto report = nlohmann::json::parse(std::ifstream(json));
  EXPECT_EQ(report["tokens"], 30);
  EXPECT_EQ(report["prompt_tokens"], 21);
  EXPECT_EQ(report["ranks"], 2);
  EXPECT_GT(report["bytes_sent_per_token"], 0);
}

TEST_F(ModelProgramTest, SamplesTheSameWithTheSameSeed) {
  const std::string same = "-p abc -n 20 --temp 1 --activations f32 ";
  const std::string first = Run("generate", same + "--seed 5").output;
  EXPECT_EQ(Run("generate", same + "--seed 5 --ranks 3").output, first);
  EXPECT_NE(Run("generate", same + "--seed 6").output, first);
}

TEST_F(ModelProgramTest, AnswersManyPrompts) {
  const std::string file =
      WriteText("prompts.jsonl",
                "{\"prompt\": \"one\", \"id\": \"a\"}\n\n{\"prompt\": \"two, longer\"}\n"
                "{\"prompt\": \"\\u00e9\"}\n");
  std::map<std::string, std::string> texts;
  for (const char* parallel : {"1", "2", "8"}) {
    const Outcome outcome =
        Run("generate", "--activations f32 --kv-type f32 -n 9 --ranks 2 --prompts " + file +
                            " --parallel " + parallel);
    EXPECT_EQ(outcome.code, 0) << outcome.error;
    std::istringstream lines(outcome.output);
    std::string line;
    int count = 0;
    while (std::getline(lines, line)) {
      const auto json = nlohmann::json::parse(line);
      EXPECT_EQ(json["tokens"], 9);
      const auto [entry, fresh] = texts.emplace(json["id"].dump(), json["text"]);
      EXPECT_EQ(entry->second, json["text"]);
      ++count;
    }
    EXPECT_EQ(count, 3);
  }
  EXPECT_EQ(texts.size(), 3u);
  ExpectError(Run("generate", "--prompts " + WriteText("bad.jsonl", "{\"prompt\": \"x\"}\n{]\n")),
              4, "line 2");
  ExpectError(Run("generate", "--prompts " + WriteText("none.jsonl", "\n")), 4, "has no prompts");
}

TEST_F(ModelProgramTest, GoesOnFromASavedContext) {
  const std::string exact = "--activations f32 --kv-type f32 ";
  const std::string saved = (folder_ / "context").string();
  const Outcome whole = Run("generate", exact + "-p 'The beginning and more' -n 12");
  EXPECT_EQ(whole.code, 0) << whole.error;
  const Outcome first =
      Run("generate", exact + "-p 'The beginning' -n 0 --ranks 4 --save-context " + saved);
  EXPECT_EQ(first.code, 0) << first.error;
  for (const char* ranks : {"1", "3", "4"}) {
    const Outcome second = Run(
        "generate", exact + "-p ' and more' -n 12 --load-context " + saved + " --ranks " + ranks);
    EXPECT_EQ(second.code, 0) << second.error;
    EXPECT_EQ(second.output, whole.output) << ranks << " ranks";
  }
  ExpectError(Run("generate", "-p x --kv-type q8_0 --load-context " + saved), 4,
              "are f32, not q8_0");
  ExpectError(Run("generate", exact + "-p x --load-context /nowhere"), 4, "/nowhere");
  const Outcome onto = Run("generate", exact + "-p x --save-context /proc/none");
  EXPECT_EQ(onto.code, 4) << onto.error;
}

TEST_F(ModelProgramTest, SaysWhyAContextCannotBeSavedOrLoaded) {
  const std::string saved = (folder_ / "context").string();
  const std::string save = "-p 'The beginning' -n 0 --ranks 4 --save-context " + saved;
  EXPECT_EQ(Run("generate", save).code, 0);
  // As if the disk were full: no file may have more than 1024 bytes.
  const Outcome full =
      RunProgram("generate -m '" + model_.path() + "' " + save, "trap '' XFSZ; ulimit -f 2;");
  EXPECT_EQ(full.code, 4) << full.error;
  EXPECT_NE(full.error.find("cannot write '" + saved), std::string::npos) << full.error;
  const std::string load = "-p x -n 1 --ranks 3 --load-context " + saved;
  EXPECT_EQ(Run("generate", load).code, 0);
  for (const auto& entry : fs::directory_iterator(saved)) {
    if (entry.path().extension() == ".kv") fs::resize_file(entry.path(), 7);
  }
  ExpectError(Run("generate", load), 4, "has 7 bytes");
}

TEST_F(ModelProgramTest, RefusesBadInput) {
  ExpectUsageError(Run("generate", ""), "one of -p, -f and --prompts is needed; 0 were given");
  ExpectUsageError(Run("generate", "-p a -f b"), "2 were given");
  ExpectUsageError(Run("generate", "-p ''"), "the prompt is empty");
  ExpectUsageError(Run("generate", "-p a -n 9000"),
                   "9001 tokens are needed; the model was made for 8192");
  ExpectUsageError(Run("generate", "-p abcdef -n 1 --ctx 4"), "6 tokens");
  ExpectUsageError(Run("generate", "-p a --ctx 9000"), "--ctx is 9000");
  ExpectUsageError(Run("generate", "-p a --kv-type q4"), "q4");
  ExpectUsageError(Run("generate", "-p a --int8-queries"),
                   "--int8-queries needs --kv-type q8_0, not f16");
  EXPECT_EQ(Run("generate", "-p a -n 3 --int8-queries --kv-type q8_0").code, 0);
  ExpectUsageError(RunProgram("generate -p a --activations bf16 -m '" + model_.path() + "'",
                              "TREELINE_ISA=scalar "),
                   "amx or avx512-bf16; scalar does not");
  ExpectError(Run("generate", "-f " + WriteText("bad.txt", "ok\xFF")), 4,
              "bad.txt' is not UTF-8 at byte 2");
  ExpectError(Run("tokenize", "< '" + (folder_ / "bad.txt").string() + "'"), 4,
              "standard input is not UTF-8 at byte 2");
  ExpectError(Run("tokenize", "< /"), 4, "cannot read standard input: Is a directory");
  ExpectError(RunProgram("bench decode --links /"), 4, "cannot read '/': Is a directory");
  ExpectError(Run("generate", "-f /nowhere"), 4, "cannot read '/nowhere'");
  ExpectError(Run("generate", "-p a --chat"), 4, "no template");
  ExpectError(RunProgram("generate -p a -m /nowhere"), 4, "cannot open '/nowhere'");
  ExpectError(RunProgram("generate -p a -m " + WriteText("no.gguf", "GGUF")), 4, "the version");
  ExpectUsageError(
      RunProgram("model random --like tiny --type Q4_K " + (folder_ / "x.gguf").string()),
      "cannot be of type Q4_K");
  ExpectUsageError(RunProgram("model get nothing"), "there are: smollm2");
}

TEST_F(ModelProgramTest, DescribesAndTokenizes) {
  const auto info =
      nlohmann::json::parse(RunProgram("model info '" + model_.path() + "' --json -").output);
  EXPECT_EQ(info["heads"], 9);
  EXPECT_EQ(info["types"].size(), 2u);
  const auto tokens = nlohmann::json::parse(Run("tokenize", "-p 'h\xC3\xA9 ' --json -").output);
  EXPECT_EQ(tokens.size(), 4u);  // bytes
  EXPECT_EQ(tokens[0]["text"], "h");
}

TEST_F(ModelProgramTest, PerplexityDoesNotDependOnRanks) {
  std::string text;
  for (int i = 0; i < 700; ++i) text += static_cast<char>('a' + i * i % 26);
  const std::string file = WriteText("text.txt", text);
  const auto perplexity = [&](const std::string& more) {
    const Outcome outcome =
        Run("perplexity", "--activations f32 --kv-type f32 --json - -f " + file + more);
    EXPECT_EQ(outcome.code, 0) << outcome.error;
    return nlohmann::json::parse(outcome.output)["perplexity"].get<double>();
  };
  const double one = perplexity("");
  EXPECT_NEAR(perplexity(" --ranks 3") / one, 1.0, 1e-5);
  ExpectUsageError(Run("perplexity", "-f " + WriteText("one.txt", "x")), "2 are needed");
}

}  // namespace
