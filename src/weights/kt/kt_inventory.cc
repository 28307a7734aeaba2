#include "weights/kt/kt_inventory.h"

#include <algorithm>
#include <tuple>

#include "base/checked.h"
#include "base/error.h"

namespace kt::inline weights {
namespace {

auto order_of(const KtName& name) {
  return std::tuple(name.layer, name.expert, name.projection, name.backward, name.part, name.scale);
}

// Stops at the first array that is not where a whole model has it, so names with huge numbers cost nothing.
void check_complete(std::string_view path, std::span<const KtEntry> entries, const KtInventory& inventory) {
  size_t at = 0;
  for (const int layer : inventory.layers) {
    for (int expert = 0; expert < inventory.experts; ++expert) {
      for (const KtName& name : kt_expert_arrays(inventory.model, layer, expert)) {
        if (at == entries.size() || entries[at].name != name) {
          fail("{}: {} is missing; {} layers of {} experts in {} parts need {} arrays, there are {}", path,
               kt_tensor_name(name), inventory.layers.size(), inventory.experts, inventory.model.parts,
               inventory.layers.size() * static_cast<size_t>(inventory.experts) *
                   kt_expert_arrays(inventory.model, 0, 0).size(),
               entries.size());
        }
        ++at;
      }
    }
  }
  KT_CHECK(at == entries.size(), "{} of {} arrays", at, entries.size());
}

uint64_t bytes_of(std::span<const KtEntry> entries, const KtName& name) {
  const auto found = std::lower_bound(
      entries.begin(), entries.end(), name,
      [](const KtEntry& entry, const KtName& wanted) { return in_file_order(entry.name, wanted); });
  KT_CHECK(found != entries.end() && found->name == name, "{}", kt_tensor_name(name));
  return found->bytes;
}

// Names of tensors do not tell int4 from int8; sizes do. Up to 64 columns both take the same bytes: then it
// is int8, because existing int4 files have at least 128.
int bits_of(std::string_view path, uint64_t gate_bytes, uint64_t gate_rows, uint64_t hidden) {
  const auto bytes = [&](int bits) {
    return checked_mul(gate_rows, round_up(hidden, uint64_t{bits == 4 ? 128u : 64u}), path) *
           static_cast<uint64_t>(bits) / 8;
  };
  if (gate_bytes == bytes(8)) return 8;
  if (gate_bytes == bytes(4)) return 4;
  fail("{}: a gate of {} rows and {} columns has {} bytes; int8 would have {}, int4 {}", path, gate_rows,
       hidden, gate_bytes, bytes(8), bytes(4));
}

void set_sizes(std::string_view path, std::span<const KtEntry> entries, const KtClaims& claims,
               const ModelConfig& config, KtModel& model) {
  KtName gate = entries.front().name, down = gate;
  gate.projection = Projection::kGate;
  gate.backward = down.backward = gate.scale = false;
  gate.part = down.part = 0;
  down.projection = Projection::kDown;
  down.scale = true;
  const uint64_t gate_bytes = bytes_of(entries, gate);
  gate.scale = true;
  const uint64_t gate_rows = bytes_of(entries, gate) / sizeof(float);
  const uint64_t down_rows = bytes_of(entries, down) / sizeof(float);
  constexpr uint64_t kMost = uint64_t{1} << 31;
  if (gate_rows < 1 || down_rows < 1 || gate_rows > kMost || down_rows > kMost)
    fail("{}: {} and {} have {} and {} scales", path, kt_tensor_name(gate), kt_tensor_name(down), gate_rows,
         down_rows);
  model.hidden = claims.hidden   ? claims.hidden
                 : config.hidden ? config.hidden
                                 : static_cast<int64_t>(down_rows);
  model.inter = claims.inter   ? claims.inter
                : config.inter ? config.inter
                               : checked_mul(static_cast<int64_t>(gate_rows), int64_t{model.parts}, path);
  model.bits =
      claims.bits ? claims.bits : bits_of(path, gate_bytes, gate_rows, static_cast<uint64_t>(model.hidden));
  if (model.inter % model.parts != 0)
    fail("{}: {} parts do not divide an intermediate size of {}", path, model.parts, model.inter);
}

void check_sizes(std::string_view path, std::span<const KtEntry> entries, const KtModel& model) {
  for (const KtEntry& entry : entries) {
    const KtShape shape = kt_part_shape(model, entry.name);
    const uint64_t expected = entry.name.scale ? shape.scale_bytes : shape.weight_bytes;
    if (entry.bytes != expected)
      fail("{}: {}: expected {} bytes for [{}, {}] int{} (hidden {}, intermediate {}, {} parts), found {}",
           path, kt_tensor_name(entry.name), expected, shape.n, shape.k, model.bits, model.hidden,
           model.inter, model.parts, entry.bytes);
  }
}

void check_config(std::string_view path, const KtInventory& inventory, const ModelConfig& config) {
  if (config.experts && config.experts != inventory.experts)
    fail("{}: has {} experts, its config says {}", path, inventory.experts, config.experts);
  if (config.hidden && config.hidden != inventory.model.hidden)
    fail("{}: hidden size {}, its config says {}", path, inventory.model.hidden, config.hidden);
  if (config.inter && config.inter != inventory.model.inter)
    fail("{}: intermediate size {}, its config says {}", path, inventory.model.inter, config.inter);
  if (!config.experts) return;
  for (int layer = 0; layer < config.layers; ++layer) {
    if (config.is_moe_layer(layer) && !std::ranges::binary_search(inventory.layers, layer))
      fail("{}: layer {} is missing; {} layers are there and the config says that layer {} has experts", path,
           layer, inventory.layers.size(), layer);
  }
}

}  // namespace

bool in_file_order(const KtName& a, const KtName& b) { return order_of(a) < order_of(b); }

KtInventory take_inventory(std::string_view path, std::span<const KtEntry> entries, const KtClaims& claims,
                           const ModelConfig& config) {
  if (entries.empty()) fail_as(ErrorKind::kUnsupported, "{}: no converted experts in it", path);
  KtInventory out;
  for (const KtEntry& entry : entries) {
    if (out.layers.empty() || out.layers.back() != entry.name.layer) out.layers.push_back(entry.name.layer);
    out.experts = std::max(out.experts, entry.name.expert + 1);
    out.model.parts = std::max(out.model.parts, entry.name.part + 1);
    out.model.backward |= entry.name.backward;
  }
  // Before anything is sized by a number from a name.
  if (static_cast<size_t>(out.model.parts) > entries.size())
    fail("{}: {} arrays cannot be {} parts", path, entries.size(), out.model.parts);
  if (claims.parts && claims.parts != out.model.parts)
    fail("{}: has {} parts, its description says {}", path, out.model.parts, claims.parts);
  check_complete(path, entries, out);
  set_sizes(path, entries, claims, config, out.model);
  check_sizes(path, entries, out.model);
  check_config(path, out, config);
  return out;
}

}  // namespace kt::inline weights
