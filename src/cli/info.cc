#include <cstdio>
#include <memory>
#include <optional>

#include "cli/command.h"
#include "cli/limits.h"
#include "cli/machine.h"
#include "cli/problem.h"
#include "cli/report.h"
#include "treeline/thread_pool.h"

namespace treeline::cli {
namespace {

struct InfoOptions {
  int threads = 1;
  std::string json;
};

std::string Size(std::size_t bytes) {
  char text[32];
  if (bytes >= (std::size_t{1} << 20)) {
    std::snprintf(text, sizeof(text), "%zu MiB", bytes >> 20);
  } else {
    std::snprintf(text, sizeof(text), "%zu KiB", bytes >> 10);
  }
  return text;
}

void RunInfo(const InfoOptions& options) {
  const Machine machine = DescribeMachine();
  ThreadPool pool(options.threads);
  const Context context{.pool = &pool, .isa = DefaultIsa()};
  const Limits limits = MeasureLimits(context);
  if (options.json != "-") {
    std::string isas;
    for (Isa isa : machine.isas) isas.append(isas.empty() ? "" : ", ").append(Name(isa));
    std::printf("treeline          %s (%s, %s)\n", machine.version.c_str(), machine.commit.c_str(),
                machine.compiler.c_str());
    std::printf("CPU               %s\n", machine.cpu.c_str());
    std::printf("cores             %d\n", machine.cores);
    for (const Cache& cache : machine.caches) {
      std::printf("L%d cache          %d x %s\n", cache.level, cache.count,
                  Size(cache.bytes).c_str());
    }
    std::printf("instruction sets  %s; in use: %s\n", isas.c_str(),
                std::string(Name(*context.isa)).c_str());
    std::printf("read bandwidth    %.1f GB/s (%d threads, 4 streams each, 512 MiB)\n",
                limits.read_gbps, options.threads);
    std::printf("FMA peak          %.1f GFLOP/s (%d threads, f32)\n", limits.fma_gflops,
                options.threads);
  }
  WriteJson(options.json, {{"machine", ToJson(machine, *context.isa)}, {"limits", ToJson(limits)}});
}

}  // namespace

void AddInfo(CLI::App& program) {
  CLI::App* command = program.add_subcommand(
      "info", "Show the CPU, its caches and instruction sets, and measure its limits");
  command->footer(
      "Bandwidth and peak are measured now, with the instruction set in use: the best one, or what "
      "TREELINE_ISA names.");
  auto options = std::make_shared<InfoOptions>();
  AddThreadsOption(*command, options->threads);
  AddJsonOption(*command, options->json);
  command->callback([options] { RunInfo(*options); });
}

}  // namespace treeline::cli
