// Chats, and what the commands about models do with files and outputs that fail.

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>

#include "cli/run_program.h"
#include "model/random_model.h"
#include "model/utf8.h"

namespace {

namespace fs = std::filesystem;
using treeline::test::ExpectError;
using treeline::test::ExpectUsageError;
using treeline::test::Outcome;
using treeline::test::RunProgram;

class ChatProgramTest : public testing::Test {
 protected:
  ChatProgramTest() {
    fs::create_directories(folder_);
    treeline::model::WriteRandomModel(
        {.like = "tiny", .chat_template = "{{ '<|im_start|>' + message['role'] }}"}, model_);
  }
  ~ChatProgramTest() override { fs::remove_all(folder_); }

  // A chat whose input a shell command writes. It samples: the likeliest token is always the same.
  Outcome Chat(const std::string& input, const std::string& arguments) {
    return RunProgram(
        "chat -m '" + model_ + "' --activations f32 --kv-type f32 --temp 1 " + arguments,
        "(" + input + ") |");
  }
  std::string Path(const std::string& name) const { return (folder_ / name).string(); }

  static void WriteFile(const std::string& path, const std::string& text) {
    std::ofstream(path, std::ios::binary) << text;
  }
  static std::string ReadFile(const std::string& path) {
    std::ifstream stream(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(stream), {}};
  }

  const fs::path folder_ =
      fs::temp_directory_path() / ("treeline-chat-" + std::to_string(getpid()));
  const std::string model_ = Path("tiny.gguf");
};

TEST_F(ChatProgramTest, RanksWaitForAUserWhoThinks) {
  const Outcome at_once = Chat("echo hello", "-n 8");
  ASSERT_EQ(at_once.code, 0) << at_once.error;
  EXPECT_GE(at_once.output.size(), 9u);
  const Outcome late =
      Chat("sleep 3; printf hel; sleep 1; echo lo; sleep 2", "-n 8 --ranks 2 --timeout 1");
  EXPECT_EQ(late.code, 0) << late.error;
  EXPECT_EQ(late.output, at_once.output);
  EXPECT_EQ(late.error.find("error"), std::string::npos) << late.error;
}

TEST_F(ChatProgramTest, ForgetsWhenTold) {
  const std::string once = Chat("echo abc", "-n 20").output;
  EXPECT_EQ(Chat("printf 'abc\\n/reset \\t\\r\\n\\n \\r\\nabc'", "-n 20").output, once + once);
  EXPECT_NE(Chat("printf 'abc\\nabc\\n'", "-n 20").output, once + once);
}

// Tokens are bytes, chosen at random: hardly any answer is UTF-8.
TEST_F(ChatProgramTest, GoesOnAfterAnAnswerThatIsNotText) {
  const Outcome outcome = Chat("printf 'one\\ntwo\\nthree\\n'", "-n 40 --ranks 2");
  EXPECT_EQ(outcome.code, 0) << outcome.error;
  EXPECT_FALSE(treeline::model::IsUtf8(outcome.output));
}

TEST_F(ChatProgramTest, SaysWhatIsWrong) {
  const Outcome bad_line = Chat("printf 'a\\377\\nabc\\n'", "-n 4");
  EXPECT_EQ(bad_line.code, 0);
  EXPECT_NE(bad_line.error.find("this line is not UTF-8"), std::string::npos) << bad_line.error;
  const Outcome too_long = Chat("echo abcdefghijklmnopqrstuvwxyz", "--ctx 16");
  EXPECT_EQ(too_long.code, 0);
  EXPECT_NE(too_long.error.find("the context holds 16: /reset"), std::string::npos)
      << too_long.error;
  ExpectUsageError(Chat("true", "--system \"$(printf 'a\\377')\""), "--system is not UTF-8");
  ExpectError(RunProgram("chat -m '" + model_ + "' <" + folder_.string()), 1,
              "cannot read standard input: Is a directory");
  ExpectError(RunProgram("chat -m '" + model_ + "' >/dev/full", "echo a |"), 1,
              "cannot write to standard output: No space left on device");
  treeline::model::WriteRandomModel({.like = "tiny"}, model_);
  ExpectError(Chat("true", ""), 4, "no template");
}

TEST_F(ChatProgramTest, OutputThatCannotBeWrittenIsAnError) {
  const std::string text = Path("text.txt");
  WriteFile(text, "some text");
  const std::string model = " -m '" + model_ + "' ";
  for (const std::string& command :
       {"perplexity" + model + "-f " + text, "perplexity" + model + "--json - -f " + text,
        "tokenize" + model + "-p abc", "model info '" + model_ + "'",
        "model info --json - " + model_, std::string("--help"), std::string("info")}) {
    ExpectError(RunProgram(command + " >/dev/full"), 1,
                "cannot write to standard output: No space");
  }
}

TEST_F(ChatProgramTest, KeepsAFileThatItCannotReplace) {
  const std::string out = Path("out.gguf");
  const std::string command = "model random --like tiny " + out;
  WriteFile(out, "precious");
  // No file may grow beyond some blocks.
  ExpectError(RunProgram(command, "trap '' XFSZ; ulimit -f 8;"), 1,
              "cannot write '" + out + "': File too large");
  EXPECT_EQ(ReadFile(out), "precious");
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_), {}), 2);  // and the model
  ExpectError(RunProgram("model random --like tiny /nowhere/out"), 1, "No such file or directory");
  ExpectUsageError(RunProgram("model random --like tiny /dev/null"), "is no regular file");
  EXPECT_TRUE(fs::is_character_file("/dev/null"));

  fs::create_symlink(out, Path("link"));
  EXPECT_EQ(RunProgram("model random --like tiny " + Path("link")).code, 0);
  EXPECT_TRUE(fs::is_symlink(Path("link")));
  const Outcome info = RunProgram("model info --json - " + out);
  ASSERT_EQ(info.code, 0) << info.error;
  EXPECT_EQ(nlohmann::json::parse(info.output)["types"].size(), 2u);  // of matrices and norms
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_), {}), 3);
}

TEST_F(ChatProgramTest, ANameCannotSteerTheTerminal) {
  std::string bytes = ReadFile(model_);
  const std::size_t at = bytes.find("random weights");
  ASSERT_NE(at, std::string::npos);
  bytes.replace(at, 6, "\x1B[2J\xC2\x9B");
  WriteFile(model_, bytes);
  const Outcome info = RunProgram("model info " + model_);
  ASSERT_EQ(info.code, 0) << info.error;
  EXPECT_NE(info.output.find("\uFFFD[2J\uFFFD weights"), std::string::npos) << info.output;
}

TEST_F(ChatProgramTest, HelpHasExamples) {
  for (const std::string command :
       {"chat", "perplexity", "tokenize", "model get", "model info", "model random"}) {
    const Outcome outcome = RunProgram(command + " --help");
    EXPECT_EQ(outcome.code, 0);
    const std::size_t example = outcome.output.find("Example");
    ASSERT_NE(example, std::string::npos) << command;
    EXPECT_NE(outcome.output.find("treeline " + command, example), std::string::npos) << command;
  }
  EXPECT_NE(RunProgram("model random --help").output.find("Q8_0, "), std::string::npos);
}

}  // namespace
