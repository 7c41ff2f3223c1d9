#include "cli/report.h"

#include <nlohmann/json.hpp>

#include "cli/limits.h"
#include "cli/problem.h"
#include "cli/ranks.h"

namespace treeline::cli {
namespace {

constexpr int kRepeats = 5;
constexpr std::size_t kReadBytes = std::size_t{512} << 20;
// Of MeasureLimits: while its memory is filled, and before each measurement.
constexpr int kPauses = static_cast<int>(kReadBytes / HugeBuffer::kPiece) + 2 * kRepeats;
static_assert(kReadBytes % HugeBuffer::kPiece == 0);

}  // namespace

Limits MeasureLimits(const Context& context, const std::function<void()>& pause) {
  const HugeBuffer buffer(kReadBytes, pause);
  std::vector<double> read;
  std::vector<double> fma;
  for (int i = 0; i < kRepeats; ++i) {
    pause();
    read.push_back(ReadBandwidth(context, buffer.data(), buffer.size()));
    pause();
    fma.push_back(FmaPeak(context));
  }
  return {Median(read) / 1e9, Median(fma) / 1e9};
}

Limits MeasureLimitsAlone(const Context& context, const std::function<void()>& pause) {
  if (IsFirst()) return MeasureLimits(context, pause);
  for (int i = 0; i < kPauses; ++i) pause();
  return {};
}

nlohmann::ordered_json ToJson(const Machine& machine, Isa isa) {
  nlohmann::ordered_json json{{"cpu", machine.cpu},       {"cores", machine.cores},
                              {"isa", Name(isa)},         {"version", machine.version},
                              {"commit", machine.commit}, {"compiler", machine.compiler}};
  for (Isa each : machine.isas) json["isas"].push_back(Name(each));
  json["caches"] = nlohmann::ordered_json::array();
  for (const Cache& cache : machine.caches) {
    json["caches"].push_back(
        {{"level", cache.level}, {"bytes", cache.bytes}, {"count", cache.count}});
  }
  return json;
}

nlohmann::ordered_json ToJson(const Limits& limits) {
  return {
      {"read_gbps", limits.read_gbps}, {"fma_gflops", limits.fma_gflops}, {"amx_gflops", nullptr}};
}

}  // namespace treeline::cli
