#pragma once

#include <span>
#include <string>
#include <vector>

#include "model/llama_rank.h"

namespace treeline::model {

// A sequence's tokens, keys and values in a folder: a file for each rank, and `context.json`, which
// names them with their checksums. It is written last, and replaced at once: whatever happens while
// a context is saved, the one before it can be loaded.
//
// A FormatError of the collective calls is thrown by all ranks alike, and the group can go on.
// Files may take longer to write or read than the communicator's timeout.

// Saves a sequence, in a folder that all ranks must reach; it is made if it is not there. Saves
// into one folder wait for each other, up to 10 minutes. Throws ArgumentError if the tokens are not
// as many as the sequence has, and FormatError if something cannot be written. The folder has no
// new files then, unless all that failed was to make the new context safe from a crash. Collective.
void SaveContext(LlamaRank& rank, Communicator& comm, SequenceId id, std::span<const Token> tokens,
                 const std::string& folder);

// What a folder holds.
struct SavedContext {
  std::vector<Token> tokens;
};

// Throws FormatError if the folder holds no context, or one of another model, of another version or
// with keys of another type.
SavedContext DescribeContext(const LlamaModel& model, DType kv_type, const std::string& folder);

// Appends a context to a sequence without tokens, on any number of ranks, and returns its tokens.
// Throws as DescribeContext, FormatError if a file is damaged, or is replaced meanwhile, and
// ArgumentError if there is no room; the sequence has no tokens then. Collective.
std::vector<Token> LoadContext(LlamaRank& rank, Communicator& comm, SequenceId id,
                               const std::string& folder);

}  // namespace treeline::model
