#include "model/utf8.h"

#include <algorithm>
#include <cstdint>

namespace treeline::model {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

// How a character starts: its length, and the range of its second byte. Length 0: it cannot. The
// ranges leave out what is too long, surrogates, and what is beyond U+10FFFF.
struct Lead {
  std::size_t length;
  std::uint8_t low;
  std::uint8_t high;
};

Lead LeadOf(std::uint8_t byte) {
  if (byte < 0x80) return {1, 0, 0};
  if (byte < 0xC2) return {0, 0, 0};
  if (byte < 0xE0) return {2, 0x80, 0xBF};
  if (byte == 0xE0) return {3, 0xA0, 0xBF};
  if (byte == 0xED) return {3, 0x80, 0x9F};
  if (byte < 0xF0) return {3, 0x80, 0xBF};
  if (byte == 0xF0) return {4, 0x90, 0xBF};
  if (byte < 0xF4) return {4, 0x80, 0xBF};
  if (byte == 0xF4) return {4, 0x80, 0x8F};
  return {0, 0, 0};
}

// Bytes of the character at the start of `text` that are as they must be.
std::size_t GoodBytes(std::string_view text, const Lead& lead) {
  std::size_t good = 1;
  for (; good < std::min(lead.length, text.size()); ++good) {
    const auto byte = static_cast<std::uint8_t>(text[good]);
    const bool second = good == 1;
    if (byte < (second ? lead.low : 0x80) || byte > (second ? lead.high : 0xBF)) break;
  }
  return good;
}

}  // namespace

std::size_t Utf8Prefix(std::string_view text) {
  std::size_t at = 0;
  while (at < text.size()) {
    const Lead lead = LeadOf(static_cast<std::uint8_t>(text[at]));
    if (lead.length == 0 || GoodBytes(text.substr(at), lead) < lead.length) break;
    at += lead.length;
  }
  return at;
}

std::size_t IncompleteUtf8(std::string_view text) {
  for (std::size_t bytes = 1; bytes <= std::min<std::size_t>(3, text.size()); ++bytes) {
    const std::string_view end = text.substr(text.size() - bytes);
    const Lead lead = LeadOf(static_cast<std::uint8_t>(end[0]));
    if (lead.length > bytes && GoodBytes(end, lead) == bytes) return bytes;
  }
  return 0;
}

std::string ReplaceInvalidUtf8(std::string_view text) {
  std::string valid;
  for (;;) {
    const std::size_t good = Utf8Prefix(text);
    valid += text.substr(0, good);
    text.remove_prefix(good);
    if (text.empty()) return valid;
    valid += kReplacement;
    const Lead lead = LeadOf(static_cast<std::uint8_t>(text[0]));
    text.remove_prefix(GoodBytes(text, lead));
  }
}

std::string Printable(std::string_view text) {
  const std::string valid = ReplaceInvalidUtf8(text);
  std::string printable;
  for (std::size_t at = 0; at < valid.size();) {
    const auto byte = static_cast<std::uint8_t>(valid[at]);
    const std::size_t length = LeadOf(byte).length;
    const bool control = byte < 0x20 || byte == 0x7F ||
                         (byte == 0xC2 && static_cast<std::uint8_t>(valid[at + 1]) < 0xA0);
    printable += control ? kReplacement : std::string_view(valid).substr(at, length);
    at += length;
  }
  return printable;
}

}  // namespace treeline::model
