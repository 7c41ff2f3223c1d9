#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace treeline {

// Instruction sets that kernels are built for. kAvx512Bf16 and kAmx are kAvx512 with matrix
// products in bf16; kPlainBf16 is the same with those products in plain loops, for tests: never the
// best, and never listed.
enum class Isa : std::uint8_t {
  kScalar,
  kSse4,
  kAvx2,
  kAvx512,
  kNeon,
  kAvx512Bf16,
  kAmx,
  kPlainBf16
};

// "scalar", "sse4", "avx2", "avx512", "neon", "avx512-bf16", "amx", "plain-bf16".
std::string_view Name(Isa isa);

// Whether forward and backward attention of queries, keys and values in bf16 is computed in bf16,
// with sums in f32: faster, and less exact than f32 (docs/numerics.md has the bounds). All else is
// computed in f32 on every instruction set.
bool ComputesInBf16(Isa isa);

// Those that this build has and this CPU can run, best last. Asks the system, once, for permission
// to use AMX in all threads of the process.
const std::vector<Isa>& AttainableIsas();

// Inverse of Name. Throws ArgumentError, listing what there is, if the name is unknown or the
// instruction set is not attainable here; for "amx" it says why.
Isa ParseIsa(std::string_view name);

// The best attainable one, unless the environment variable TREELINE_ISA names another.
// Throws ArgumentError as ParseIsa does.
Isa DefaultIsa();

}  // namespace treeline
