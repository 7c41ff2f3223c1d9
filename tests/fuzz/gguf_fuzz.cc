// Any bytes are a model, or are refused with a FormatError: nothing else happens. A model that was
// accepted must bear being read to its last byte.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "model/llama_model.h"
#include "treeline/errors.h"

namespace {

using treeline::model::Matrix;

void ReadLast(const Matrix& matrix) {
  std::vector<float> row(static_cast<std::size_t>(matrix.columns));
  matrix.Read(matrix.rows - 1, row.data());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  // Rows are read as numbers, so the file must be aligned as a mapped one is.
  const std::vector<std::byte> bytes(reinterpret_cast<const std::byte*>(data),
                                     reinterpret_cast<const std::byte*>(data) + size);
  try {
    const treeline::model::LlamaModel model(bytes, "fuzz");
    ReadLast(model.embedding());
    ReadLast(model.head());
    for (const auto& layer : model.layers()) {
      for (const Matrix* matrix :
           {&layer.q, &layer.k, &layer.v, &layer.output, &layer.gate, &layer.up, &layer.down}) {
        ReadLast(*matrix);
      }
    }
  } catch (const treeline::FormatError&) {
  }
  return 0;
}
