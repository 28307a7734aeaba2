// GGUF expert tensors: blocks with their scales inside, decoded by formats/.
#include "base/checked.h"
#include "base/error.h"
#include "weights/dialects/dialects.h"

namespace kt::inline weights {

Reading read_gguf(const Module& module, const Slab& weight) {
  if (module.find({"scale"}))
    fail_as(ErrorKind::kUnsupported, "{}: GGUF experts with a separate scale are not read", weight.name());
  const auto type = gguf_type(weight.tensor->gguf_type);
  if (!type)
    fail_as(ErrorKind::kUnsupported, "{}: expert weights of type {} are not read", weight.name(),
            describe(*weight.tensor));
  if (weight.shape.size() != 2)
    fail("{}: expected {} dimensions, found {}", weight.name(), module.expert < 0 ? 2 : 3,
         describe(*weight.tensor));
  Reading out{.dialect = "gguf", .type = InputType::kGguf, .planes = {}};
  StoredPlanes& p = out.planes;
  p.format = gguf_format(*type);
  p.n = weight.shape[0];
  p.k = weight.shape[1];
  p.codes = weight.bytes;
  p.gguf_type = *type;
  const int64_t block = gguf_block_size(*type);
  if (p.k % block != 0)
    fail("{}: {} needs a multiple of {} columns, found {}", weight.name(), name_of(*type), block, p.k);
  p.row_stride = checked_mul(p.k / block, int64_t{gguf_block_bytes(*type)}, weight.name());
  p.packing = p.format.scale == Scale::kNone ? CodePacking::kPlain : CodePacking::kGguf;
  p.column_stride = code_bytes(p.format.code);
  return out;
}

}  // namespace kt::inline weights
