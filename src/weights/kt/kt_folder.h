// A folder of `.kt` files: found once, read one file at a time. There can be hundreds of thousands of them,
// so none stays open and none is mapped.
#pragma once
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "weights/kt/kt_inventory.h"

namespace kt::inline weights {

class KtFolder {
 public:
  // Error naming the file: a .kt file whose name or size is not what kt_names.h describes, two files for one
  // array, int4 beside int8. Files of other names are left alone.
  explicit KtFolder(std::string path);

  const std::string& path() const { return path_; }
  std::span<const KtEntry> entries() const { return entries_; }  // in file order
  const KtInventory& inventory() const { return inventory_; }    // with what kt_weights.json says, if there
  // Whether there is a config.json.
  bool has_config() const { return has_config_; }

  uint64_t bytes(const KtName& name) const { return kt_array_bytes(inventory_.model, name); }
  // The whole file into `out`, which has its size; any thread. Error if it changed its size or went away.
  void read(const KtName& name, std::span<std::byte> out) const;

 private:
  void scan(int& bits);
  void scan_part(const std::string& folder, int layer, int part, int& bits);

  std::string path_;
  std::vector<KtEntry> entries_;
  KtInventory inventory_;
  bool has_config_ = false;
};

// Whether a folder has at least one `_layer_<number>` in it.
bool has_kt_layers(const std::string& path);

}  // namespace kt::inline weights
