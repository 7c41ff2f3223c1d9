// Associative recall: attention with V = K is one retrieval step of a modern Hopfield network.
// Letters are stored as keys; a damaged one is the query; each step replaces the query by the
// attention output and lowers the energy |q|^2 / 2 - lse / scale. See docs/theory.md.
//
// Exits with 1 if the energy rises beyond rounding or the letter is not recalled in every pixel.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "treeline/attention.h"

namespace {

constexpr int kSide = 8;
constexpr int kPixels = kSide * kSide;
constexpr int kFlipped = 20;  // pixels of the damaged letter
constexpr int kMaxSteps = 20;
constexpr double kSettled = 0.02;   // a step shorter than this is not taken
constexpr double kRounding = 1e-4;  // of an energy: f32 results of size 64, divided by the scale

struct Letter {
  char name;
  std::string_view pixels;  // [kSide, kSide]
};

constexpr std::array kLetters{
    Letter{'T',
           "########"
           "########"
           "   ##   "
           "   ##   "
           "   ##   "
           "   ##   "
           "   ##   "
           "   ##   "},
    Letter{'R',
           "######  "
           "##   ## "
           "##   ## "
           "######  "
           "## ##   "
           "##  ##  "
           "##   ## "
           "##    ##"},
    Letter{'E',
           "########"
           "##      "
           "##      "
           "######  "
           "######  "
           "##      "
           "##      "
           "########"},
    Letter{'L',
           "##      "
           "##      "
           "##      "
           "##      "
           "##      "
           "##      "
           "########"
           "########"},
    Letter{'I',
           " ###### "
           "   ##   "
           "   ##   "
           "   ##   "
           "   ##   "
           "   ##   "
           "   ##   "
           " ###### "},
    Letter{'N',
           "##    ##"
           "###   ##"
           "####  ##"
           "## ## ##"
           "##  ####"
           "##   ###"
           "##    ##"
           "##    ##"},
};
static_assert(std::all_of(kLetters.begin(), kLetters.end(),
                          [](const Letter& letter) { return letter.pixels.size() == kPixels; }));
constexpr std::size_t kDamaged = 1;

using Bitmap = std::vector<float>;  // [kPixels], row by row; -1 is white and 1 is black

Bitmap Draw(const Letter& letter) {
  Bitmap bitmap;
  for (char pixel : letter.pixels) bitmap.push_back(pixel == '#' ? 1.0f : -1.0f);
  return bitmap;
}

// Flips kFlipped pixels, the same ones in every run and with every standard library.
Bitmap Damage(Bitmap bitmap) {
  std::vector<std::size_t> order(bitmap.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::mt19937 generator(2408);
  for (std::size_t i = 0; i < kFlipped; ++i) {
    std::swap(order[i], order[i + generator() % (order.size() - i)]);
    bitmap[order[i]] *= -1.0f;
  }
  return bitmap;
}

double Distance(std::span<const float> a, std::span<const float> b) {
  double sum = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double difference = static_cast<double>(a[i]) - b[i];
    sum += difference * difference;
  }
  return std::sqrt(sum);
}

// The stored letters, and attention over them.
class Memory {
 public:
  Memory() : spec_(treeline::AttentionSpec::Make(/*heads=*/1, /*kv_heads=*/1, kPixels)) {
    for (const Letter& letter : kLetters) {
      const Bitmap bitmap = Draw(letter);
      keys_.insert(keys_.end(), bitmap.begin(), bitmap.end());
    }
  }

  float scale() const { return spec_.scale; }

  // One query over all letters: its next state, and the energy that it has now.
  struct Step {
    Bitmap next;
    double energy;
  };
  Step Recall(const Bitmap& query) const {
    using treeline::DType;
    using treeline::TensorView;
    const auto stored = static_cast<std::int64_t>(kLetters.size());
    const TensorView keys = TensorView::Dense(keys_.data(), DType::kF32, stored, 1, kPixels);
    Step step{Bitmap(kPixels), 0.0};
    float lse = 0.0f;
    const treeline::AttendTask task{
        .q = TensorView::Dense(query.data(), DType::kF32, 1, 1, kPixels),
        .q_positions = treeline::Positions::Contiguous(0, 1),
        .kv = treeline::KvView::Strided(keys, keys),
        .kv_positions = treeline::Positions::Contiguous(0, stored),
        .result = {.out = step.next, .lse = {&lse, 1}, .v_head_dim = kPixels}};
    treeline::Attend(spec_, {&task, 1});
    const double length = Distance(query, Bitmap(kPixels, 0.0f));
    step.energy = length * length / 2 - static_cast<double>(lse) / spec_.scale;
    return step;
  }

  struct Match {
    std::size_t letter;
    double distance;
  };
  Match Nearest(const Bitmap& query) const {
    Match best{0, Distance(query, Stored(0))};
    for (std::size_t i = 1; i < kLetters.size(); ++i) {
      const double distance = Distance(query, Stored(i));
      if (distance < best.distance) best = {i, distance};
    }
    return best;
  }

 private:
  std::span<const float> Stored(std::size_t letter) const {
    return std::span(keys_).subspan(letter * kPixels, kPixels);
  }

  treeline::AttentionSpec spec_;
  std::vector<float> keys_;  // [letters, kPixels]; the values too
};

// Bitmaps side by side, four to a line, each under its step.
void Print(std::span<const Bitmap> bitmaps) {
  constexpr std::size_t kPerLine = 4;
  constexpr std::string_view kShades = " .:+#";  // white to black
  for (std::size_t first = 0; first < bitmaps.size(); first += kPerLine) {
    const auto line = bitmaps.subspan(first, std::min(kPerLine, bitmaps.size() - first));
    std::printf("\n");
    for (std::size_t i = 0; i < line.size(); ++i) {
      std::printf("%s  step %-2zu", i == 0 ? "" : "          ", first + i);
    }
    std::printf("\n");
    for (std::size_t y = 0; y < kSide; ++y) {
      std::string text;
      for (const Bitmap& bitmap : line) {
        text += " |";
        for (std::size_t x = 0; x < kSide; ++x) {
          const float black = (std::clamp(bitmap[y * kSide + x], -1.0f, 1.0f) + 1.0f) / 2.0f;
          // Twice, because a character is twice as high as wide.
          text.append(2, kShades[static_cast<std::size_t>(std::lround(black * 4.0f))]);
        }
        text += "|";
      }
      std::printf("%s\n", text.c_str());
    }
  }
}

}  // namespace

int main() {
  const Memory memory;
  const Bitmap original = Draw(kLetters[kDamaged]);
  Bitmap state = Damage(original);
  std::printf("%zu letters of %d pixels are stored. %c is given with %d pixels flipped.\n",
              kLetters.size(), kPixels, kLetters[kDamaged].name, kFlipped);
  std::printf("Each step is q <- attention(q) over the letters, with scale %g.\n\n",
              memory.scale());
  std::printf("  step      energy      change  nearest  distance\n");

  std::vector<Bitmap> states;
  double energy = 0.0;
  bool rose = false;
  for (int step = 0; step <= kMaxSteps; ++step) {
    Memory::Step recalled = memory.Recall(state);
    const Memory::Match nearest = memory.Nearest(state);
    std::printf("  %4d  %10.4f", step, recalled.energy);
    if (step == 0) {
      std::printf("           -");
    } else {
      std::printf("  %10.4f", recalled.energy - energy);
      rose = rose || recalled.energy > energy + kRounding;
    }
    std::printf("  %7c  %8.4f\n", kLetters[nearest.letter].name, nearest.distance);
    energy = recalled.energy;
    states.push_back(state);
    if (Distance(state, recalled.next) < kSettled) break;
    state = std::move(recalled.next);
  }
  Print(states);

  const Bitmap& last = states.back();
  int right = 0;  // pixels on the side of zero where the original has them
  for (std::size_t i = 0; i < last.size(); ++i) right += last[i] * original[i] > 0.0f ? 1 : 0;
  const std::size_t recalled = memory.Nearest(last).letter;
  std::printf("\nRecalled %c; %d of %d pixels are those of %c.\n", kLetters[recalled].name, right,
              kPixels, kLetters[kDamaged].name);
  if (rose) std::printf("error: the energy rose\n");
  if (recalled != kDamaged) std::printf("error: the wrong letter was recalled\n");
  return rose || recalled != kDamaged || right != kPixels ? 1 : 0;
}
