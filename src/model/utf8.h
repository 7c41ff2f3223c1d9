#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace treeline::model {

// The length of the longest beginning of `text` that is UTF-8.
std::size_t Utf8Prefix(std::string_view text);

inline bool IsUtf8(std::string_view text) { return Utf8Prefix(text) == text.size(); }

// Bytes at the end of `text` that may be the beginning of a character: it is to be shown once the
// rest has come. 0 to 3.
std::size_t IncompleteUtf8(std::string_view text);

// `text` as UTF-8: what is not becomes U+FFFD, one for each beginning of a character that breaks
// off, and for each byte that begins none.
std::string ReplaceInvalidUtf8(std::string_view text);

// `text` as a terminal may be given it: likewise, and control characters (U+0000 to U+001F, U+007F
// to U+009F) become U+FFFD, too.
std::string Printable(std::string_view text);

}  // namespace treeline::model
