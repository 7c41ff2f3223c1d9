#include "model/saved_context.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <set>
#include <thread>
#include <utility>

#include "model/context_manifest.h"
#include "model/generator.h"
#include "model/tiny_model.h"
#include "schedule/collectives/collectives.h"
#include "treeline/errors.h"

namespace treeline::model {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::AnyOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

// Of a token in all layers, as bf16: what a shard has for each of its tokens.
constexpr std::size_t kTokenBytes = std::size_t{2} * 3 * (32 + 32) * 2;

// As a disk that is full: no file of this process can grow beyond so many bytes.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(std::size_t bytes) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    getrlimit(RLIMIT_FSIZE, &before_);
    rlimit limit = before_;
    limit.rlim_cur = bytes;
    EXPECT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  }
  ~FileSizeLimit() {
    setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;

 private:
  rlimit before_{};
  void (*handler_)(int);
};

std::string ReadFile(const fs::path& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

void WriteFile(const fs::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

void FlipBit(const fs::path& path, std::size_t byte) {
  std::string text = ReadFile(path);
  text[byte] = static_cast<char>(text[byte] ^ 1);
  WriteFile(path, text);
}

class SavedContextTest : public testing::Test {
 protected:
  SavedContextTest()
      : folder_(fs::temp_directory_path() / ("treeline-context-" + std::to_string(getpid()))) {
    for (int i = 0; i < 100; ++i) tokens_.push_back(i * 7 % 320);
  }
  ~SavedContextTest() override { fs::remove_all(folder_); }

  template <class Body>
  void OnRanks(const ThreadRanks& ranks, DType kv_type, const Body& body) {
    RunRanks(ranks, [&](Communicator& comm) {
      LlamaRank rank(model_, comm, {.poll = ProgressOf(comm)},
                     {.kv_type = kv_type, .activations = Activations::kF32, .sequences = 2});
      body(rank, comm);
    });
  }
  template <class Body>
  void OnRanks(int ranks, DType kv_type, const Body& body) {
    OnRanks(ThreadRanks{.ranks = ranks}, kv_type, body);
  }

  // What all ranks throw alike, after which the group goes on. Empty if they do not throw.
  template <class Body>
  std::string ErrorOfAll(int ranks, const Body& body) {
    std::vector<std::string> errors(static_cast<std::size_t>(ranks));
    OnRanks(ranks, DType::kBF16, [&](LlamaRank& rank, Communicator& comm) {
      try {
        body(rank, comm);
      } catch (const FormatError& error) {
        errors[static_cast<std::size_t>(comm.rank())] = error.what();
      }
      Barrier(comm);
    });
    for (const std::string& error : errors) EXPECT_EQ(error, errors[0]);
    return errors[0];
  }

  void PrefillAndSave(LlamaRank& rank, Communicator& comm, std::size_t tokens,
                      const fs::path& folder) {
    const SequenceId id = rank.cache().Add(comm.size() / 2);
    const auto some = std::span(tokens_).first(tokens);
    rank.Prefill(id, some, {});
    SaveContext(rank, comm, id, some, folder.string());
  }
  void Save(int ranks, DType kv_type, std::size_t tokens) {
    OnRanks(ranks, kv_type, [&](LlamaRank& rank, Communicator& comm) {
      PrefillAndSave(rank, comm, tokens, folder_);
    });
  }
  std::string SaveError(int ranks, std::size_t tokens) {
    return ErrorOfAll(ranks, [&](LlamaRank& rank, Communicator& comm) {
      PrefillAndSave(rank, comm, tokens, folder_);
    });
  }
  std::string LoadError(int ranks) {
    return ErrorOfAll(ranks, [&](LlamaRank& rank, Communicator& comm) {
      const SequenceId id = rank.cache().Add(0);
      try {
        LoadContext(rank, comm, id, folder_.string());
      } catch (const FormatError&) {
        EXPECT_EQ(rank.cache().length(id), 0);
        throw;
      }
    });
  }

  // Logits of one more token after those that were saved.
  std::vector<float> LoadAndDecode(int ranks, DType kv_type) {
    return Decode(ranks, kv_type, [&](LlamaRank& rank, Communicator& comm, SequenceId id) {
      const std::vector<Token> loaded = LoadContext(rank, comm, id, folder_.string());
      EXPECT_EQ(rank.cache().length(id), static_cast<std::int64_t>(loaded.size()));
    });
  }
  // The same without saving.
  std::vector<float> PrefillAndDecode(DType kv_type, std::size_t tokens) {
    return Decode(1, kv_type, [&](LlamaRank& rank, Communicator&, SequenceId id) {
      rank.Prefill(id, std::span(tokens_).first(tokens), {});
    });
  }
  template <class Before>
  std::vector<float> Decode(int ranks, DType kv_type, const Before& before) {
    std::vector<float> result;
    OnRanks(ranks, kv_type, [&](LlamaRank& rank, Communicator& comm) {
      const SequenceId id = rank.cache().Add(0);
      before(rank, comm, id);
      std::vector<float> logits(320);
      const LlamaRank::Next next{id, 5};
      rank.Decode(std::span(&next, 1), logits);
      if (comm.rank() == 0) result = logits;
    });
    return result;
  }

  // The folder's context has so many tokens, and goes on as they do.
  void ExpectHolds(std::size_t tokens) {
    ASSERT_EQ(SavedTokens(), tokens);
    const std::vector<float> want = PrefillAndDecode(DType::kBF16, tokens);
    const std::vector<float> got = LoadAndDecode(3, DType::kBF16);
    for (std::size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(got[i], want[i], 2e-2);
  }
  std::size_t SavedTokens() {
    return DescribeContext(model_, DType::kBF16, folder_.string()).tokens.size();
  }

  std::set<std::string> Files(const fs::path& folder) const {
    std::set<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder)) names.insert(entry.path().filename());
    return names;
  }
  // The file of one of the ranks that saved.
  fs::path ShardOf(int rank) const {
    for (const std::string& name : Files(folder_)) {
      if (name.starts_with("shard-" + std::to_string(rank) + "-")) return folder_ / name;
    }
    ADD_FAILURE() << "no shard of rank " << rank;
    return {};
  }

  const test::TinyModel file_;
  const LlamaModel model_{file_.path()};
  const fs::path folder_;
  std::vector<Token> tokens_;
};

TEST_F(SavedContextTest, GoesOnWhereItWasOnAnyNumberOfRanks) {
  for (const DType kv_type : {DType::kF32, DType::kBF16, DType::kF16, DType::kQ8_0}) {
    for (const int savers : {1, 4}) {
      for (const std::size_t tokens : {std::size_t{1}, std::size_t{3}, tokens_.size()}) {
        Save(savers, kv_type, tokens);
        EXPECT_EQ(DescribeContext(model_, kv_type, folder_.string()).tokens.size(), tokens);
        const std::vector<float> want = PrefillAndDecode(kv_type, tokens);
        for (const int loaders : {1, 3, 4, 7}) {
          const std::vector<float> got = LoadAndDecode(loaders, kv_type);
          for (std::size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(got[i], want[i], 2e-2);
        }
      }
    }
  }
}

TEST_F(SavedContextTest, GoesOnWithTheTokensThatWouldHaveFollowed) {
  const auto answer = [&](LlamaRank& rank, Communicator& comm, SequenceId id,
                          std::vector<Token>& tokens, std::span<const Token> question) {
    Request request{.prompt = tokens, .most_tokens = 20};
    request.prompt.insert(request.prompt.end(), question.begin(), question.end());
    Generator(rank, comm).Continue(id, tokens, request, {});
  };
  const auto first = std::span(tokens_).first(30);
  const auto second = std::span(tokens_).subspan(50, 10);

  std::vector<Token> want;
  OnRanks(1, DType::kF32, [&](LlamaRank& rank, Communicator& comm) {
    const SequenceId id = rank.cache().Add(0);
    answer(rank, comm, id, want, first);
    answer(rank, comm, id, want, second);
  });
  ASSERT_EQ(want.size(), 30u + 20u + 10u + 20u);

  OnRanks(4, DType::kF32, [&](LlamaRank& rank, Communicator& comm) {
    const SequenceId id = rank.cache().Add(1);
    std::vector<Token> tokens;
    answer(rank, comm, id, tokens, first);
    SaveContext(rank, comm, id, tokens, folder_.string());
  });
  OnRanks(3, DType::kF32, [&](LlamaRank& rank, Communicator& comm) {
    const SequenceId id = rank.cache().Add(0);
    std::vector<Token> tokens = LoadContext(rank, comm, id, folder_.string());
    answer(rank, comm, id, tokens, second);
    EXPECT_EQ(tokens, want);
  });
}

// A number that no other element of the cache has.
float Element(std::int64_t position, int layer, int side, int head, int d) {
  return static_cast<float>((((position * 2 + layer) * 2 + side) * 3 + head) * 32 + d);
}

TEST_F(SavedContextTest, KeepsEveryBitOfManyBlocks) {
  constexpr std::int64_t kTokens = 3000;
  const std::vector<Token> tokens(kTokens, 1);
  OnRanks(1, DType::kF32, [&](LlamaRank& rank, Communicator& comm) {
    const SequenceId id = rank.cache().Add(0);
    const SlotRange slots = rank.cache().Grow(id, kTokens);
    for (int layer = 0; layer < 2; ++layer) {
      std::array<std::vector<float>, 2> rows;
      for (int side = 0; side < 2; ++side) {
        for (std::int64_t p = 0; p < kTokens; ++p) {
          for (int i = 0; i < 3 * 32; ++i) {
            rows[static_cast<std::size_t>(side)].push_back(Element(p, layer, side, i / 32, i % 32));
          }
        }
      }
      rank.cache().Write(id, layer, slots,
                         TensorView::Dense(rows[0].data(), DType::kF32, kTokens, 3, 32),
                         TensorView::Dense(rows[1].data(), DType::kF32, kTokens, 3, 32));
    }
    SaveContext(rank, comm, id, tokens, folder_.string());
  });
  const std::uintmax_t bytes = fs::file_size(ShardOf(0));
  ASSERT_GT(bytes, kContextBlock);
  OnRanks(3, DType::kF32, [&](LlamaRank& rank, Communicator& comm) {
    const SequenceId id = rank.cache().Add(2);
    EXPECT_EQ(LoadContext(rank, comm, id, folder_.string()), tokens);
    const Positions positions = rank.cache().positions(id);
    std::int64_t wrong = 0;
    for (int layer = 0; layer < 2; ++layer) {
      const KvView view = rank.cache().View(id, layer);
      for (std::int64_t slot = 0; slot < view.slots; ++slot) {
        for (int i = 0; i < 2 * 3 * 32; ++i) {
          const int side = i / 96;
          const int head = i / 32 % 3;
          const std::byte* row = (side == 0 ? view.k : view.v).Row(slot, head, view.page_slots);
          const float got = reinterpret_cast<const float*>(row)[i % 32];
          if (got != Element(positions[slot], layer, side, head, i % 32)) ++wrong;
        }
      }
    }
    EXPECT_EQ(wrong, 0);
  });
  FlipBit(ShardOf(0), bytes - 1);
  OnRanks(3, DType::kF32, [&](LlamaRank& rank, Communicator& comm) {
    const SequenceId id = rank.cache().Add(0);
    EXPECT_THAT([&] { LoadContext(rank, comm, id, folder_.string()); },
                ThrowsMessage<FormatError>(HasSubstr("is damaged after byte 4194304")));
  });
}

TEST_F(SavedContextTest, ReplacesWhatWasThereAndLeavesNothingElse) {
  Save(4, DType::kBF16, 10);
  // Of a save that was killed, and of somebody else.
  WriteFile(folder_ / "shard-2-0123456789abcdef.kv", "x");
  WriteFile(folder_ / "context-0123456789abcdef.part", "x");
  WriteFile(folder_ / "notes.txt", "x");
  Save(2, DType::kBF16, 20);
  ExpectHolds(20);
  EXPECT_EQ(Files(folder_), (std::set<std::string>{ShardOf(0).filename(), ShardOf(1).filename(),
                                                   "context.json", "context.lock", "notes.txt"}));
}

TEST_F(SavedContextTest, MakesFoldersWithinFolders) {
  OnRanks(2, DType::kBF16, [&](LlamaRank& rank, Communicator& comm) {
    PrefillAndSave(rank, comm, 5, folder_ / "a" / "b" / "");
  });
  EXPECT_EQ(DescribeContext(model_, DType::kBF16, (folder_ / "a" / "b").string()).tokens.size(),
            5u);
}

TEST_F(SavedContextTest, SaysThatAFolderCannotBeWritten) {
  WriteFile(folder_, "a file");
  EXPECT_THAT(SaveError(4, 5), HasSubstr("cannot make '"));
}

TEST_F(SavedContextTest, RefusesWhatIsOfAnother) {
  EXPECT_THAT([&] { DescribeContext(model_, DType::kBF16, folder_.string()); },
              ThrowsMessage<FormatError>(HasSubstr("cannot open")));
  EXPECT_THAT(LoadError(3), HasSubstr("cannot open"));
  Save(2, DType::kBF16, 50);
  EXPECT_THAT([&] { DescribeContext(model_, DType::kF16, folder_.string()); },
              ThrowsMessage<FormatError>(HasSubstr("its keys and values are bf16, not f16")));
  const test::TinyModel other_file("Q4_0");
  const LlamaModel other(other_file.path());
  EXPECT_THAT([&] { DescribeContext(other, DType::kBF16, folder_.string()); },
              ThrowsMessage<FormatError>(HasSubstr("saved by another model")));
}

TEST_F(SavedContextTest, RefusesDamagedShards) {
  Save(2, DType::kBF16, 50);
  for (const int damaged : {0, 1}) {
    const fs::path shard = ShardOf(damaged);
    const std::string whole = ReadFile(shard);
    ASSERT_EQ(whole.size(), 25 * kTokenBytes);
    for (const std::size_t byte : {std::size_t{0}, std::size_t{100}, whole.size() - 1}) {
      FlipBit(shard, byte);
      for (const int ranks : {1, 3}) EXPECT_THAT(LoadError(ranks), HasSubstr("is damaged"));
      FlipBit(shard, byte);
    }
    fs::resize_file(shard, 100);
    EXPECT_THAT(LoadError(3), HasSubstr("has 100 bytes"));
    WriteFile(shard, whole + "x");
    EXPECT_THAT(LoadError(3), HasSubstr("it should have"));
    fs::remove(shard);
    EXPECT_THAT(LoadError(3), AllOf(HasSubstr("cannot open"), HasSubstr(shard.string())));
    WriteFile(shard, whole);
    EXPECT_EQ(LoadError(3), "");
  }
}

TEST_F(SavedContextTest, RefusesADamagedManifest) {
  Save(2, DType::kBF16, 50);
  const fs::path path = folder_ / kManifestName;
  const std::string whole = ReadFile(path);
  for (std::size_t byte = 0; byte < whole.size(); ++byte) {
    std::string text = whole;
    text[byte] = static_cast<char>(text[byte] ^ 1);
    EXPECT_THROW(ParseManifest(text, "it"), FormatError) << byte;
    EXPECT_THROW(ParseManifest(whole.substr(0, byte), "it"), FormatError) << byte;
  }
  const std::size_t token = whole.find("[0,7,") + 3;
  FlipBit(path, token);
  EXPECT_THAT(LoadError(3), HasSubstr("is damaged"));
  FlipBit(path, token);
  EXPECT_EQ(LoadError(3), "");
}

TEST_F(SavedContextTest, RefusesHostileManifests) {
  Save(2, DType::kBF16, 50);
  const fs::path path = folder_ / kManifestName;
  const std::string whole = ReadFile(path);
  const std::string object = whole.substr(0, whole.rfind(",\"checksum\"")) + "}";
  ASSERT_EQ(SealManifest(object), whole);
  const std::string file = ShardOf(0).filename();
  const std::string checksum = object.substr(object.find("checksums\":[\"") + 13, 16);
  const std::string deep(1 << 17, '[');
  const std::string closed(1 << 17, ']');
  for (const auto& [from, to] : std::vector<std::pair<std::string, std::string>>{
           {"\"version\":1", "\"version\":9"},
           {"\"version\":1", "\"version\":-1"},
           {"\"version\":1", "\"version\":18446744073709551615"},
           {"\"version\":1", "\"version\":" + deep + closed},
           {"\"first_rank\":1", "\"first_rank\":2"},
           {"\"first_rank\":1", "\"first_rank\":-1"},
           {"\"first_rank\":1", "\"first_rank\":1e300"},
           {"\"first_rank\":1", "\"first_rank\":18446744073709551615"},
           {"\"first_rank\":1", "\"first\":1"},
           {"[0,7,", "[320,7,"},
           {"[0,7,", "[-1,7,"},
           {"[0,7,", "[4294967296,7,"},
           {"[0,7,", "[9223372036854775808,7,"},
           {"[0,7,", "[null,7,"},
           {"[0,7,", "[7,"},
           {"\"tokens\":[", "\"tokens\":[],\"more\":["},
           {"\"tokens\":[", "\"tokens\":{},\"more\":["},
           {"\"shards\":[", "\"shards\":[],\"more\":["},
           {"\"shards\":[", "\"shards\":[0,"},
           {"\"shards\":[", "\"shards\":[{},"},
           {"\"" + file, "\"../" + file},
           {"\"" + file, "\"/dev/zero"},
           {"\"" + file + "\"", "\"\""},
           {"\"" + file + "\"", "\"shard-0\\u0000.kv\""},
           {"\"" + file + "\"", "\"shard-none.kv\""},
           {"\"" + file + "\"", deep + closed},
           {"[\"" + checksum + "\"]", "[]"},
           {"[\"" + checksum + "\"]", "{}"},
           {"\"" + checksum + "\"", "\"" + checksum + "\",\"" + checksum + "\""},
           {"\"" + checksum + "\"", "\"-123456789abcdef\""},
           {"\"" + checksum + "\"", "\"" + checksum + "0\""},
           {"\"" + checksum + "\"", "1"},
           {"\"kv_type\":\"bf16\"", "\"kv_type\":\"f64\""},
           {"\"kv_type\":\"bf16\"", "\"kv_type\":3"},
           {"\"model\":\"", "\"model\":\"0"},
           {"\"model_name\":", "\"model_name\":[],\"name\":"},
       }) {
    std::string changed = object;
    const std::size_t at = changed.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    WriteFile(path, SealManifest(changed.replace(at, from.size(), to)));
    EXPECT_THAT(LoadError(2), HasSubstr("'" + folder_.string()))
        << from << " -> " << to.substr(0, 80);
  }
  for (const std::string& text : {std::string(), std::string("{"), std::string("[]"),
                                  std::string("{}"), deep, std::string("null\n")}) {
    WriteFile(path, text);
    EXPECT_THAT(LoadError(2), HasSubstr("this is no saved context")) << text.substr(0, 80);
  }
  WriteFile(path, whole);
  ExpectHolds(50);
}

TEST_F(SavedContextTest, AFullDiskLeavesTheOldContextAlone) {
  Save(2, DType::kBF16, 30);
  const std::set<std::string> before = Files(folder_);
  std::string error;
  {
    // Of 4 ranks, the third has one token more than the others: it alone fails.
    const FileSizeLimit limit(10 * kTokenBytes);
    error = SaveError(4, 41);
  }
  EXPECT_THAT(error, AllOf(HasSubstr("cannot write"), HasSubstr("shard-2-")));
  EXPECT_EQ(Files(folder_), before);
  ExpectHolds(30);
  {
    // Room for the shards, and not for the manifest.
    const FileSizeLimit limit(kTokenBytes);
    error = SaveError(16, 16);
  }
  EXPECT_THAT(error, AllOf(HasSubstr("cannot write"), HasSubstr(".part")));
  EXPECT_EQ(Files(folder_), before);
  ExpectHolds(30);
  EXPECT_EQ(SaveError(4, 41), "");
  ExpectHolds(41);
}

TEST_F(SavedContextTest, ManyHostsMustShareTheFolder) {
  Save(2, DType::kBF16, 30);
  const std::set<std::string> before = Files(folder_);
  const fs::path elsewhere = folder_.string() + "-elsewhere";
  const auto save = [&] {
    return ErrorOfAll(4, [&](LlamaRank& rank, Communicator& comm) {
      PrefillAndSave(rank, comm, 41, comm.rank() == 3 ? elsewhere : folder_);
    });
  };
  EXPECT_THAT(save(), AllOf(HasSubstr("-elsewhere' is not there for rank 3"),
                            HasSubstr("must be shared by all hosts")));
  EXPECT_FALSE(fs::exists(elsewhere));
  EXPECT_EQ(Files(folder_), before);

  fs::create_directory(elsewhere);
  EXPECT_THAT(save(), AllOf(HasSubstr("which rank 3 has written, is not there for rank 0"),
                            HasSubstr("must be shared by all hosts")));
  EXPECT_TRUE(fs::is_empty(elsewhere));
  fs::remove(elsewhere);
  EXPECT_EQ(Files(folder_), before);
  ExpectHolds(30);
}

TEST_F(SavedContextTest, OneRankMayTakeLongerThanTheTimeout) {
  constexpr std::chrono::milliseconds kTimeout{1000};
  Save(1, DType::kBF16, 10);
  const int lock = open((folder_ / "context.lock").c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_GE(lock, 0);
  ASSERT_EQ(flock(lock, LOCK_EX), 0);
  std::thread other([&] {  // another save, which rank 0 waits for
    std::this_thread::sleep_for(3 * kTimeout);
    close(lock);
  });
  OnRanks(ThreadRanks{.ranks = 4, .timeout = kTimeout}, DType::kBF16,
          [&](LlamaRank& rank, Communicator& comm) {
            const auto start = std::chrono::steady_clock::now();
            PrefillAndSave(rank, comm, 20, folder_);
            EXPECT_GT(std::chrono::steady_clock::now() - start, kTimeout);
          });
  other.join();
  ExpectHolds(20);
}

TEST_F(SavedContextTest, TwoSavesAtATimeDoNotHarmEachOther) {
  const auto save = [&](std::size_t tokens) {
    for (int i = 0; i < 8; ++i) EXPECT_NO_THROW(Save(2, DType::kBF16, tokens));
  };
  std::thread other(save, 60);
  save(30);
  other.join();
  EXPECT_THAT(SavedTokens(), AnyOf(30u, 60u));
  ExpectHolds(SavedTokens());
  EXPECT_EQ(Files(folder_).size(), 4u);
}

TEST_F(SavedContextTest, KeepsOneOfBothWhenASaveIsKilled) {
  const std::array<std::size_t, 2> lengths{40, 97};
  const auto start = std::chrono::steady_clock::now();
  Save(4, DType::kBF16, lengths[0]);
  const std::chrono::duration<double, std::micro> some = std::chrono::steady_clock::now() - start;
  std::mt19937 random(1);
  std::uniform_int_distribution<useconds_t> moment(0, static_cast<useconds_t>(2 * some.count()));
  std::set<std::size_t> held;
  for (int i = 0; i < 30; ++i) {
    std::array<int, 2> ready{};
    ASSERT_EQ(pipe(ready.data()), 0);
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      try {
        OnRanks(4, DType::kBF16, [&](LlamaRank& rank, Communicator& comm) {
          std::array<SequenceId, 2> ids;
          for (const int s : {0, 1}) {
            ids[s] = rank.cache().Add(s);
            rank.Prefill(ids[s], std::span(tokens_).first(lengths[s]), {});
          }
          if (comm.rank() == 0 && write(ready[1], "!", 1) != 1) _exit(1);
          // One in the place of the other, until the process is killed.
          for (int s = 1;; s = 1 - s) {
            SaveContext(rank, comm, ids[s], std::span(tokens_).first(lengths[s]), folder_.string());
          }
        });
      } catch (...) {
      }
      _exit(1);
    }
    close(ready[1]);
    char byte = 0;
    EXPECT_EQ(read(ready[0], &byte, 1), 1);
    close(ready[0]);
    usleep(moment(random));
    kill(child, SIGKILL);
    int status = 0;
    waitpid(child, &status, 0);
    ASSERT_TRUE(WIFSIGNALED(status));
    held.insert(SavedTokens());
    ASSERT_THAT(SavedTokens(), AnyOf(lengths[0], lengths[1]));
    ASSERT_NO_FATAL_FAILURE(ExpectHolds(SavedTokens()));
  }
  EXPECT_EQ(held.size(), 2u);  // or no save came to its end, or all did
  Save(2, DType::kBF16, 10);
  EXPECT_EQ(Files(folder_).size(), 4u);
}

}  // namespace
}  // namespace treeline::model
