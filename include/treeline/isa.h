#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace treeline {

// Instruction sets that kernels are built for.
enum class Isa : std::uint8_t { kScalar, kSse4, kAvx2, kAvx512, kNeon };

// "scalar", "sse4", "avx2", "avx512", "neon".
std::string_view Name(Isa isa);

// Those that this build has and this CPU can run, best last.
const std::vector<Isa>& AttainableIsas();

// Inverse of Name. Throws ArgumentError, listing what there is, if the name is unknown or the
// instruction set is not attainable here.
Isa ParseIsa(std::string_view name);

// The best attainable one, unless the environment variable TREELINE_ISA names another.
// Throws ArgumentError as ParseIsa does.
Isa DefaultIsa();

}  // namespace treeline
