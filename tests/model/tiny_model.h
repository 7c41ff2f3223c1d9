#pragma once

#include <unistd.h>

#include <filesystem>
#include <string>

#include "model/random_model.h"

namespace treeline::test {

// A file of random weights that is removed at the end of the test. It has 9 query heads and 3 key
// heads: more than one, and nothing divides.
class TinyModel {
 public:
  explicit TinyModel(const std::string& type = "Q8_0")
      : path_(std::filesystem::temp_directory_path() /
              ("treeline-" + std::to_string(getpid()) + "-" + type + ".gguf")) {
    model::WriteRandomModel({.like = "tiny", .type = type}, path_.string());
  }
  ~TinyModel() { std::filesystem::remove(path_); }
  TinyModel(const TinyModel&) = delete;
  TinyModel& operator=(const TinyModel&) = delete;

  std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

}  // namespace treeline::test
