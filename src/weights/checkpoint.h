// A model on disk as one set of named tensors, whatever files hold it: safetensors (one file, shards with an
// index, or several files without one), GGUF (one file or a split set). Mapped, not read: opening costs
// headers only.
#pragma once
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "weights/config.h"
#include "weights/gguf/gguf_family.h"
#include "weights/safetensors.h"
#include "weights/tensor.h"

namespace kt::inline weights {

class Checkpoint {
 public:
  // A folder, or one file: .safetensors, .gguf (also any part of a split set), or
  // model.safetensors.index.json. Errors: missing shards (all named), a tensor in two files, an index that
  // disagrees with the files, both kinds in one folder, nothing at all. `families` are those whose GGUF files
  // are models (models/families.h); a file of another, or all without them, has the words of its metadata
  // only.
  explicit Checkpoint(const std::string& path, GgufFamilies families = {});
  ~Checkpoint();
  Checkpoint(Checkpoint&&) noexcept;
  Checkpoint& operator=(Checkpoint&&) noexcept;

  const std::string& path() const;    // as given
  const std::string& folder() const;  // where config.json and tokenizer files are
  bool is_gguf() const;
  // Converted ones (kt_names.h) are in it: then the other tensors have the names that these files give them.
  bool has_kt_experts() const;

  std::span<const Tensor> tensors() const;          // by name, ascending
  const Tensor* find(std::string_view name) const;  // null if absent
  const Tensor& at(std::string_view name) const;    // or Error naming checkpoint, tensor and the nearest name
  std::span<const std::string> files() const;       // paths
  const Metadata& metadata(int file) const;         // of a safetensors file

  // config.json beside the weights; for GGUF made from its metadata (the same keys). A safetensors file
  // without one has an empty object.
  const Json& config_json() const;
  const ModelConfig& config() const;
  // GGUF metadata of the first file; empty for safetensors.
  const GgufHeader& gguf() const;
  const GgufFamily* gguf_family() const;  // null: of none that was handed in, or no GGUF file
  GgufFamilies known_families() const;    // as handed in

  // Error(kInput) naming the file if a mapped file has another size now. One that was replaced or removed is
  // here still, as it was.
  void check_sizes() const;
  // Error(kInput) naming the file if a mapped file was replaced, resized or removed since it was opened.
  void check_unchanged() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kt::inline weights
