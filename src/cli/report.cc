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
  std::vector<double> bf16;
  for (int i = 0; i < kRepeats; ++i) {
    pause();
    read.push_back(ReadBandwidth(context, buffer.data(), buffer.size()));
    pause();
    fma.push_back(FmaPeak(context));
    bf16.push_back(Bf16Peak(context));
  }
  return {Median(read) / 1e9, Median(fma) / 1e9, Median(bf16) / 1e9,
          context.isa ? *context.isa : DefaultIsa()};
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
  nlohmann::ordered_json json{{"read_gbps", limits.read_gbps},
                              {"fma_gflops", limits.fma_gflops},
                              {"bf16_gflops", nullptr},
                              {"amx_gflops", nullptr}};
  if (limits.bf16_gflops > 0.0) json["bf16_gflops"] = limits.bf16_gflops;
  if (limits.isa == Isa::kAmx) json["amx_gflops"] = limits.bf16_gflops;
  return json;
}

}  // namespace treeline::cli
