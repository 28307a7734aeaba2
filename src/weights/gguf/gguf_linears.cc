#include "weights/gguf/gguf_linears.h"

#include <algorithm>

#include "base/checked.h"
#include "base/error.h"
#include "weights/dialects/dialects.h"
#include "weights/gguf/gguf_names.h"
#include "weights/stored_names.h"

namespace kt::inline weights {
namespace {

constexpr std::string_view kWeight = ".weight", kRowKeys = ".attn_k_b.weight", kValues = ".attn_v_b.weight",
                           kSharedGate = ".ffn_gate_inp_shexp.weight", kJoined = ".self_attn.kv_b_proj";

bool is_plain(const Tensor& tensor) {
  const auto type = gguf_type(tensor.gguf_type);
  return type == GgufType::kF32 || type == GgufType::kF16 || type == GgufType::kBF16;
}

// One matrix of the tensor: the whole of it, or the slice of a head.
StoredPlanes planes_of(const Checkpoint& checkpoint, const Tensor& tensor, int slice) {
  const ExpertTensor tensors[] = {{.suffix = "weight", .tensor = &tensor}};
  return read_module_bytes(
             {.name = tensor.name, .tensors = tensors, .expert = slice, .config = &checkpoint.config()})
      .planes;
}

// A vector as the only row of a matrix: the gate of a shared expert.
StoredPlanes planes_of_row(const Checkpoint& checkpoint, const Tensor& tensor) {
  Tensor row = tensor;
  row.shape = {1, tensor.shape.back()};
  return planes_of(checkpoint, row, -1);
}

// Rows of several matrices of one format, one after the other. Formats hold scales for single rows.
class StackedRows : public StoredMatrix {
 public:
  StackedRows(std::string source, std::vector<std::unique_ptr<StoredMatrix>> parts)
      : parts_(std::move(parts)) {
    name = std::move(source);
    format = parts_.front()->format;
    k = parts_.front()->k;
    for (const auto& part : parts_) n += part->n;
    KT_CHECK(format.span.n == 1, "{}: stacked blocks of {} rows", name, format.span.n);
  }

  Matrix rows(int64_t first, int64_t count) const override {
    Matrix out;
    out.format = format;
    out.k = k;
    const auto append = [](std::vector<uint8_t>& to, const std::vector<uint8_t>& from) {
      to.insert(to.end(), from.begin(), from.end());
    };
    walk(first, count, [&](const StoredMatrix& part, int64_t from, int64_t rows) {
      const Matrix some = part.rows(from, rows);
      out.n += rows;
      append(out.codes, some.codes);
      append(out.scales, some.scales);
      append(out.mins, some.mins);
      append(out.supers, some.supers);
      append(out.super_mins, some.super_mins);
    });
    return out;
  }

  void values(int64_t first, int64_t count, float* out) const override {
    walk(first, count, [&](const StoredMatrix& part, int64_t from, int64_t rows) {
      part.values(from, rows, out);
      out += rows * k;
    });
  }

 private:
  template <typename Visit>
  void walk(int64_t first, int64_t count, const Visit& visit) const {
    KT_CHECK(first >= 0 && count >= 0 && first <= n - count, "{}: rows {} to {} of {}", name, first,
             first + count, n);
    int64_t begin = 0;
    for (const auto& part : parts_) {
      const int64_t from = std::max(first, begin), to = std::min(first + count, begin + part->n);
      if (from < to) visit(*part, from - begin, to - from);
      begin += part->n;
    }
  }

  std::vector<std::unique_ptr<StoredMatrix>> parts_;
};

// kv_b [heads * (nope + v), rank] from the two halves: keys [heads, rank, nope] and values [heads, v, rank].
class JoinedKvB : public StoredMatrix {
 public:
  JoinedKvB(const Checkpoint& checkpoint, const Tensor& keys, const Tensor& values) {
    name = keys.name;
    const bool alike = is_plain(keys) && keys.gguf_type == values.gguf_type;
    format = alike ? gguf_format(*gguf_type(keys.gguf_type)) : format_named("f32");
    if (keys.shape.size() != 3 || values.shape.size() != 3 || keys.shape[0] != values.shape[0] ||
        keys.shape[1] != values.shape[2])
      fail("{}: {} and {} {} are not [heads, rank, keys] and [heads, values, rank]", keys.name,
           describe(keys), values.name, describe(values));
    nope_ = keys.shape[2];
    v_ = values.shape[1];
    k = keys.shape[1];
    n = checked_mul(keys.shape[0], nope_ + v_, name);
    for (int64_t head = 0; head < keys.shape[0]; ++head) {
      keys_.push_back(plane_matrix(keys.name, planes_of(checkpoint, keys, static_cast<int>(head))));
      values_.push_back(plane_matrix(values.name, planes_of(checkpoint, values, static_cast<int>(head))));
    }
  }

  Matrix rows(int64_t first, int64_t count) const override {
    std::vector<float> some(static_cast<size_t>(count * k));
    values(first, count, some.data());
    return quantise(format, some, count, k);
  }

  void values(int64_t first, int64_t count, float* out) const override {
    KT_CHECK(first >= 0 && count >= 0 && first <= n - count, "{}: rows {} to {} of {}", name, first,
             first + count, n);
    const int64_t head_rows = nope_ + v_;
    std::vector<float> stored(static_cast<size_t>(nope_ * k));
    while (count > 0) {
      const auto head = static_cast<size_t>(first / head_rows);
      const int64_t row = first % head_rows, some = std::min(count, (row < nope_ ? nope_ : head_rows) - row);
      if (row < nope_) {
        keys_[head]->values(0, k, stored.data());
        for (int64_t i = 0; i < some; ++i)
          for (int64_t j = 0; j < k; ++j) out[i * k + j] = stored[static_cast<size_t>(j * nope_ + row + i)];
      } else {
        values_[head]->values(row - nope_, some, out);
      }
      first += some;
      count -= some;
      out += some * k;
    }
  }

 private:
  int64_t nope_ = 0, v_ = 0;
  std::vector<std::unique_ptr<StoredMatrix>> keys_, values_;  // [heads]
};

// Heads whose rows the converter interleaved; 0: rows are in order.
int64_t interleaved_heads(const Checkpoint& checkpoint, std::string_view published, int64_t rows) {
  const GgufFamily* const family = checkpoint.gguf_family();
  const bool q = published.find(".self_attn.q_proj") != std::string_view::npos,
             k = published.find(".self_attn.k_proj") != std::string_view::npos;
  if (family == nullptr || !family->interleaved || (!q && !k)) return 0;
  const Json& config = checkpoint.config_json();
  const char* const key =
      k && config.contains("num_key_value_heads") ? "num_key_value_heads" : "num_attention_heads";
  const Json heads = config.value(key, Json());
  const int64_t count = heads.is_number_integer() ? heads.get<int64_t>() : 0;
  if (count < 1 || rows % count != 0 || rows / count % 2 != 0)
    fail("{}: {}: {} rows are not {} heads of an even number of rows each", checkpoint.path(),
         stored_name(checkpoint, published), rows, count);
  return count;
}

// Row h d + half d/2 + i of the published matrix is stored as row h d + 2 i + half.
std::unique_ptr<StoredMatrix> in_halves(const std::string& name, const StoredPlanes& stored, int64_t heads) {
  std::vector<std::unique_ptr<StoredMatrix>> parts;
  const int64_t head = stored.n / heads;
  for (int64_t h = 0; h < heads; ++h)
    for (int64_t half = 0; half < 2; ++half) {
      StoredPlanes planes = stored;
      planes.select_rows(h * head + half, 2, head / 2, name);
      parts.push_back(plane_matrix(name, std::move(planes)));
    }
  return std::make_unique<StackedRows>(name, std::move(parts));
}

std::string without(std::string_view name, std::string_view ending) {
  return std::string(name.substr(0, name.size() - ending.size()));
}

}  // namespace

std::vector<LinearModule> find_gguf_linears(const Checkpoint& checkpoint,
                                            const std::function<bool(std::string_view tensor)>& skip) {
  const GgufFamily* const family = checkpoint.gguf_family();
  std::vector<LinearModule> out;
  for (const Tensor& tensor : checkpoint.tensors()) {
    const std::string_view name = tensor.name;
    if (!name.ends_with(kWeight) || skip(name)) continue;
    if (name.ends_with(kRowKeys)) {
      const std::string stem = without(name, kRowKeys);
      if (checkpoint.find(stem + ".attn_kv_b.weight")) continue;  // a file with both forms: that one serves
      const Tensor* const values = checkpoint.find(stem + std::string(kValues));
      const auto norm = published_name(family, stem + ".attn_kv_a_norm.weight");
      if (values == nullptr || !norm) continue;
      const std::string layer = norm->substr(0, norm->find(".self_attn."));
      const bool quantised = !is_plain(tensor) || !is_plain(*values);
      out.push_back({layer + std::string(kJoined), &tensor, {&tensor, values}, quantised});
      continue;
    }
    const auto published = published_name(family, name);
    const bool row = name.ends_with(kSharedGate) && tensor.shape.size() == 1;
    if (!published || !published->ends_with(kWeight) || (tensor.shape.size() != 2 && !row)) continue;
    out.push_back({without(*published, kWeight), &tensor, {&tensor}, !is_plain(tensor)});
  }
  std::ranges::sort(out, {}, &LinearModule::module);
  return out;
}

std::unique_ptr<StoredMatrix> open_gguf_linear(const Checkpoint& checkpoint, const LinearModule& linear) {
  const Tensor& main = *linear.main;
  if (linear.tensors.size() == 2)
    return std::make_unique<JoinedKvB>(checkpoint, *linear.tensors[0], *linear.tensors[1]);
  const StoredPlanes planes =
      main.shape.size() == 1 ? planes_of_row(checkpoint, main) : planes_of(checkpoint, main, -1);
  if (const int64_t heads = interleaved_heads(checkpoint, linear.module, planes.n))
    return in_halves(main.name, planes, heads);
  return plane_matrix(main.name, planes);
}

std::vector<float> read_gguf_vector(const Checkpoint& checkpoint, const Tensor& tensor,
                                    std::string_view name) {
  const int64_t size = tensor.shape.empty() ? 0 : tensor.shape.back();
  if (tensor.shape.empty() || elements(tensor.shape) != size || !is_plain(tensor))
    fail("{}: expected one dimension of F32, F16 or BF16, found {}", tensor.name, describe(tensor));
  std::vector<float> stored(static_cast<size_t>(size));
  if (size == 0) return stored;
  plane_matrix(tensor.name, planes_of_row(checkpoint, tensor))->values(0, 1, stored.data());
  const int64_t heads = interleaved_heads(checkpoint, name, size);
  if (heads == 0) return stored;
  std::vector<float> out;
  const int64_t head = size / heads;
  for (int64_t h = 0; h < heads; ++h)
    for (int64_t half = 0; half < 2; ++half)
      for (int64_t i = half; i < head; i += 2) out.push_back(stored[static_cast<size_t>(h * head + i)]);
  return out;
}

}  // namespace kt::inline weights
