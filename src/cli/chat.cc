#include <poll.h>
#include <unistd.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <utility>

#include "cli/command.h"
#include "cli/model_options.h"
#include "cli/text_stream.h"
#include "core/check.h"
#include "model/utf8.h"
#include "schedule/collectives/collectives.h"

namespace treeline::cli {
namespace {

using model::Token;

struct ChatOptions {
  ModelOptions model;
  model::SamplerOptions sampling;
  std::string system;
  std::int64_t tokens = 512;
};

std::atomic<bool> interrupted = false;

// Ctrl-C ends an answer; a second one, before the next, the program.
class InterruptGuard {
 public:
  InterruptGuard() {
    interrupted = false;
    before_ = std::signal(SIGINT, [](int) {
      if (interrupted.exchange(true)) std::_Exit(130);
    });
  }
  ~InterruptGuard() { std::signal(SIGINT, before_); }
  InterruptGuard(const InterruptGuard&) = delete;
  InterruptGuard& operator=(const InterruptGuard&) = delete;

 private:
  void (*before_)(int) = SIG_DFL;
};

// Lines of standard input, which may be slow to come.
class LineReader {
 public:
  enum class Got { kLine, kNothing, kEnd };

  // Waits no longer than `wait`; what has come of a line by then is kept. Throws Error if the input
  // cannot be read.
  Got Read(std::chrono::milliseconds wait, std::string& line) {
    const auto deadline = Clock::now() + wait;
    for (std::size_t searched = 0;;) {
      if (const std::size_t end = held_.find('\n', searched); end != std::string::npos) {
        line = held_.substr(0, end);
        held_.erase(0, end + 1);
        return Got::kLine;
      }
      searched = held_.size();
      if (ended_) {  // the last line need not have an end
        line = std::exchange(held_, {});
        return line.empty() ? Got::kEnd : Got::kLine;
      }
      if (!Fill(deadline)) return Got::kNothing;
    }
  }

 private:
  using Clock = std::chrono::steady_clock;

  // Takes what there is, once there is something; false if that is not before the deadline.
  bool Fill(Clock::time_point deadline) {
    using std::chrono::milliseconds;
    const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now());
    if (left <= milliseconds::zero()) return false;
    constexpr milliseconds kLongest(std::numeric_limits<int>::max());
    pollfd input{.fd = STDIN_FILENO, .events = POLLIN, .revents = 0};
    const int ready = poll(&input, 1, static_cast<int>(std::min(left, kLongest).count()));
    if (ready == 0) return false;
    std::array<char, 1 << 16> bytes;
    const ssize_t count = ready < 0 ? -1 : read(STDIN_FILENO, bytes.data(), bytes.size());
    if (count < 0) {
      if (errno == EINTR || errno == EAGAIN) return false;
      Throw<Error>("cannot read standard input: ", std::strerror(errno));
    }
    if (count == 0) ended_ = true;
    held_.append(bytes.data(), static_cast<std::size_t>(count));
    return true;
  }

  std::string held_;
  bool ended_ = false;
};

// What rank 0 tells the others while they wait for the user.
enum class Next : std::uint8_t { kWait, kAnswer, kEnd };

// The chat as rank 0 knows it.
class Chat {
 public:
  Chat(const ChatOptions& options, const ModelRun& run)
      : system_(options.system), run_(run), terminal_(isatty(STDIN_FILENO) == 1) {
    Require(model::IsUtf8(system_), "--system is not UTF-8");
    run.vocabulary().Format({{"user", ""}});  // throws if the model is not for chats
    Forget();
    if (!terminal_ || !IsFirst()) return;
    std::fprintf(stderr,
                 "%s on %d ranks. /reset forgets, Ctrl-C ends an answer, Ctrl-D the chat.\n",
                 model::Printable(run.model().shape().name).c_str(), run.ranks());
  }

  // Listens to the user, no longer than `wait`. With kAnswer comes what is to be answered.
  Next Listen(std::chrono::milliseconds wait, std::vector<Token>& prompt) {
    if (terminal_ && !asked_) std::fputs("> ", stderr);
    asked_ = true;
    std::string line;
    switch (input_.Read(wait, line)) {
      case LineReader::Got::kNothing:
        return Next::kWait;
      case LineReader::Got::kEnd:
        if (terminal_) std::fputs("\n", stderr);
        return Next::kEnd;
      case LineReader::Got::kLine:
        break;
    }
    asked_ = false;
    line.erase(line.find_last_not_of(" \t\r") + 1);
    if (line == "/reset") Forget();
    if (line.empty() || line == "/reset") return Next::kWait;
    prompt = Ask(line);
    return prompt.empty() ? Next::kWait : Next::kAnswer;
  }

  // The answer to what was asked last. It may end within a character.
  void Note(std::string_view answer) {
    messages_.push_back({"assistant", model::ReplaceInvalidUtf8(answer)});
  }
  // What was asked last has not been answered: it is as if it had not been asked.
  void TakeBack() { messages_.pop_back(); }

 private:
  void Forget() {
    messages_.clear();
    if (!system_.empty()) messages_.push_back({"system", system_});
  }

  // The chat with one more question; none, and it is said why, if that cannot be.
  std::vector<Token> Ask(const std::string& line) {
    if (!model::IsUtf8(line)) {
      std::fputs("treeline: this line is not UTF-8\n", stderr);
      return {};
    }
    messages_.push_back({"user", line});
    const model::Vocabulary& vocabulary = run_.vocabulary();
    std::vector<Token> prompt = vocabulary.Tokenize(vocabulary.Format(messages_), true, true);
    if (static_cast<std::int64_t>(prompt.size()) < run_.context()) return prompt;
    std::fprintf(stderr, "treeline: the chat has %zu tokens; the context holds %lld: /reset\n",
                 prompt.size(), static_cast<long long>(run_.context()));
    TakeBack();
    return {};
  }

  const std::string system_;
  const ModelRun& run_;
  const bool terminal_;
  LineReader input_;
  bool asked_ = false;  // the user knows that a line is wanted
  std::vector<model::ChatMessage> messages_;
};

// The next prompt, on all ranks; none at the end. While the user thinks, the others hear of it: no
// wait of theirs comes near its deadline.
std::optional<std::vector<Token>> NextPrompt(Communicator& comm, Chat& chat) {
  for (;;) {
    std::vector<Token> prompt;
    Next next = Next::kWait;
    if (comm.rank() == 0) {
      next = chat.Listen(std::max(comm.timeout() / 3, std::chrono::milliseconds(1)), prompt);
    }
    Broadcast(comm, 0, std::as_writable_bytes(std::span(&next, 1)));
    if (next == Next::kEnd) return std::nullopt;
    if (next == Next::kAnswer) return Share(comm, std::move(prompt));
  }
}

// What rank 0 does with an answer while it comes.
class Answering {
 public:
  explicit Answering(const model::Vocabulary& vocabulary) : vocabulary_(vocabulary) {}

  // They refer to this object.
  model::GenerationEvents Listen() {
    return {.prefilled = [this](std::size_t, std::int64_t tokens,
                                std::int64_t of) { return ShowProgress(tokens, of); },
            .generated = [this](std::size_t, Token token,
                                std::span<const float>) { return Add(token); },
            .ended = [this](std::size_t) { stream_.End(); },
            .is_end = [this](Token token) { return vocabulary_.IsEnd(token); }};
  }
  const std::string& text() const { return text_; }

 private:
  bool ShowProgress(std::int64_t tokens, std::int64_t of) {
    const bool ends = tokens == of || interrupted;
    if (!progress_ && !ends) progress_.emplace("prompt", static_cast<std::size_t>(of));
    if (progress_) progress_->Set(static_cast<std::size_t>(tokens));
    if (ends) progress_.reset();
    return !interrupted;
  }
  bool Add(Token token) {
    if (interrupted) return false;
    const std::string piece = vocabulary_.Piece(token);
    text_ += piece;
    stream_.Write(piece);
    return true;
  }

  const model::Vocabulary& vocabulary_;
  std::string text_;
  TextStream stream_;
  std::optional<Progress> progress_;
};

void Run(const ChatOptions& options) {
  ModelRun run(options.model);
  run.Need(run.model().shape().context);
  Chat chat(options, run);  // rank 0's; the others leave it alone
  run.Run(1, [&](ModelRank& rank) {
    const bool first = rank.comm.rank() == 0;
    const SequenceId id = rank.llama.cache().Add(0);
    std::vector<Token> known;  // of the sequence
    while (const std::optional<std::vector<Token>> prompt = NextPrompt(rank.comm, chat)) {
      const std::int64_t room = run.context() - static_cast<std::int64_t>(prompt->size());
      Answering answer(run.vocabulary());
      const std::optional<InterruptGuard> guard =
          first ? std::make_optional<InterruptGuard>() : std::nullopt;
      rank.generator.Continue(id, known,
                              {.prompt = *prompt,
                               .most_tokens = std::min(options.tokens, room),
                               .sampling = options.sampling},
                              answer.Listen());
      if (!first) continue;
      if (interrupted && answer.text().empty()) {
        chat.TakeBack();
      } else {
        chat.Note(answer.text());
      }
    }
  });
}

}  // namespace

void AddChat(CLI::App& program) {
  auto options = std::make_shared<ChatOptions>();
  CLI::App* command = program.add_subcommand("chat", "Talk with a model, a line at a time");
  AddModelOptions(*command, options->model);
  command->add_option("--system", options->system, "What the model is told first")
      ->type_name("TEXT");
  command->add_option("-n,--tokens", options->tokens, "Tokens of an answer at most")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 32))
      ->capture_default_str()
      ->type_name("N");
  AddSamplingOptions(*command, options->sampling);
  command->footer(
      "What the model has seen before is not computed again. /reset forgets the chat. Ctrl-C ends "
      "an "
      "answer; under mpirun, it goes to mpirun, and ends the job.\n\n"
      "Examples:\n  treeline chat -m $(treeline model get smollm2) --ranks 2\n"
      "  treeline chat -m model.gguf --system \"Answer in one sentence.\" --temp 0.7");
  command->callback([options] { Run(*options); });
}

}  // namespace treeline::cli
