#include <CLI/CLI.hpp>

#include "cli/bench_kernel.h"
#include "cli/bench_model.h"
#include "cli/bench_ranks.h"
#include "cli/command.h"
#include "core/check.h"

namespace treeline::cli {

void AddBench(CLI::App& program) {
  CLI::App* bench =
      program.add_subcommand("bench", "Time what Treeline does, beside the machine's own limits");
  AddBenchKernel(*bench);
  AddBenchDecode(*bench);
  AddBenchPrefill(*bench);
  AddBenchTrain(*bench);
  AddBenchModel(*bench);
  bench->callback([bench] {
    Require(!bench->get_subcommands().empty(),
            "bench needs to know what: kernel, decode, prefill, train or model");
  });
}

}  // namespace treeline::cli
