#include "model/utf8.h"

#include <gtest/gtest.h>

namespace treeline::model {
namespace {

TEST(Utf8Test, FindsWhatIsNotUtf8) {
  const struct {
    std::string_view text;
    std::size_t prefix;
  } cases[] = {
      {"", 0},
      {"plain", 5},
      {"\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80", 9},
      {"a\x80", 1},             // a continuation alone
      {"a\xC0\x80", 1},         // too long
      {"\xC1\xBF", 0},          // likewise
      {"\xE0\x9F\xBF", 0},      // likewise
      {"\xF0\x8F\xBF\xBF", 0},  // likewise
      {"\xED\xA0\x80", 0},      // a surrogate
      {"\xED\x9F\xBF", 3},      // the last before them
      {"\xF4\x8F\xBF\xBF", 4},  // the last character
      {"\xF4\x90\x80\x80", 0},  // beyond it
      {"\xF5\x80\x80\x80", 0},
      {"\xFF", 0},
      {"ok\xE2\x82", 2},  // cut off
      {"\xE2\x28\xA1", 0},
  };
  for (const auto& c : cases) {
    EXPECT_EQ(Utf8Prefix(c.text), c.prefix) << testing::PrintToString(c.text);
    EXPECT_EQ(IsUtf8(c.text), c.prefix == c.text.size());
  }
}

TEST(Utf8Test, HoldsBackTheBeginningOfACharacter) {
  EXPECT_EQ(IncompleteUtf8(""), 0u);
  EXPECT_EQ(IncompleteUtf8("a"), 0u);
  EXPECT_EQ(IncompleteUtf8("a\xC3"), 1u);
  EXPECT_EQ(IncompleteUtf8("a\xC3\xA9"), 0u);
  EXPECT_EQ(IncompleteUtf8("a\xE2\x82"), 2u);
  EXPECT_EQ(IncompleteUtf8("a\xF0\x9F\x98"), 3u);
  EXPECT_EQ(IncompleteUtf8("a\xF0\x9F\x98\x80"), 0u);
  EXPECT_EQ(IncompleteUtf8("a\xE2\x28"), 0u);  // cannot become a character any more
  EXPECT_EQ(IncompleteUtf8("a\x80"), 0u);
  EXPECT_EQ(IncompleteUtf8("\xFF"), 0u);
}

TEST(Utf8Test, ReplacesWhatIsNotUtf8) {
  const struct {
    std::string_view text;
    std::string_view valid;
  } cases[] = {
      {"", ""},
      {"h\xC3\xA9", "h\xC3\xA9"},
      {"ok\xE2\x82", "ok\uFFFD"},              // cut off: one character
      {"a\xF0\x9F\x98z", "a\uFFFDz"},          // likewise, within
      {"\x80\x80", "\uFFFD\uFFFD"},            // two that begin none
      {"\xED\xA0\x80", "\uFFFD\uFFFD\uFFFD"},  // a surrogate: no second byte fits
      {"\xFF\xE2\x82\xAC\xC3", "\uFFFD\u20AC\uFFFD"},
      {"\xF0\x9F\xC3\xA9", "\uFFFD\u00E9"},
  };
  for (const auto& c : cases) {
    EXPECT_EQ(ReplaceInvalidUtf8(c.text), c.valid) << testing::PrintToString(c.text);
  }
  // Every end of every text becomes UTF-8.
  const std::string_view text = "a\u00E9\u20AC\U0001F600";
  for (std::size_t bytes = 0; bytes <= text.size(); ++bytes) {
    EXPECT_TRUE(IsUtf8(ReplaceInvalidUtf8(text.substr(0, bytes))));
    EXPECT_TRUE(IsUtf8(ReplaceInvalidUtf8(text.substr(bytes))));
  }
}

TEST(Utf8Test, LeavesOutControlCharacters) {
  EXPECT_EQ(Printable("plain \u00A0\u20AC"), "plain \u00A0\u20AC");
  EXPECT_EQ(Printable("a\x1B[2J\r\n\tb\x7F"), "a\uFFFD[2J\uFFFD\uFFFD\uFFFDb\uFFFD");
  EXPECT_EQ(Printable(std::string_view("\0x", 2)), "\uFFFDx");
  EXPECT_EQ(Printable("\u0080\u009B\u009F\u00A0"), "\uFFFD\uFFFD\uFFFD\u00A0");
  EXPECT_EQ(Printable("\x9B\xC2"), "\uFFFD\uFFFD");
}

}  // namespace
}  // namespace treeline::model
