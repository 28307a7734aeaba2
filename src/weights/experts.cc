// Opening a checkpoint's experts: every tensor's name is read once into an index; every module's header is
// checked against the others and the config; bytes are touched only when a matrix is asked for.
#include "weights/experts.h"

#include <algorithm>
#include <map>
#include <set>
#include <span>
#include <vector>

#include "base/checked.h"
#include "base/error.h"
#include "text/shown.h"
#include "weights/dialects/dialects.h"
#include "weights/dialects/expert_names.h"
#include "weights/dialects/fused.h"
#include "weights/gguf/gguf_names.h"
#include "weights/kt/kt_folder.h"
#include "weights/kt/kt_names.h"

namespace kt::inline weights {
namespace {

struct InputName {
  std::string_view name;
  InputType type;
};
constexpr InputName kInputNames[] = {
    {"auto", InputType::kAuto}, {"bf16", InputType::kBf16}, {"fp16", InputType::kFp16},
    {"f32", InputType::kF32},   {"fp8", InputType::kFp8},   {"int4", InputType::kInt4},
    {"gguf", InputType::kGguf},
};

std::string_view input_name(InputType type) {
  for (const InputName& row : kInputNames)
    if (row.type == type) return row.name;
  return "?";
}

NamedPart part_of(Projection projection) {
  switch (projection) {
    case Projection::kGate:
      return NamedPart::kGate;
    case Projection::kUp:
      return NamedPart::kUp;
    case Projection::kDown:
      break;
  }
  return NamedPart::kDown;
}

auto key(const ExpertTensor& t) { return std::tuple(t.layer, t.expert, t.part); }

// What the tensors of one layer have in common.
struct LayerStyle {
  std::string stem;           // "model.layers.3.mlp.experts"
  std::string_view names[3];  // of gate, up, down: "gate_proj" or "w1"
  bool fused = false, per_expert = false;
  FusedStyle style;
};

class CheckpointExperts : public ExpertSource {
 public:
  CheckpointExperts(const Checkpoint& checkpoint, InputType type)
      : checkpoint_(checkpoint), config_(checkpoint.config()), type_(type) {
    index();
    settle_experts();
    for (auto& [layer, style] : styles_)
      if (style.fused)
        style.style =
            fused_style(part(layer, -1, NamedPart::kGateUp).empty() ? part(layer, -1, NamedPart::kGate)
                                                                    : part(layer, -1, NamedPart::kGateUp),
                        part(layer, -1, NamedPart::kDown), config_);
    for (const auto& [layer, style] : styles_) check_layer(layer, style);
  }

  std::string_view dialect() const override { return dialect_; }
  int experts() const override { return experts_; }
  int64_t hidden() const override { return hidden_; }
  int64_t inter() const override { return inter_; }

  std::vector<int> layers() const override {
    std::vector<int> out;
    for (const auto& [layer, style] : styles_) out.push_back(layer);
    return out;
  }

  std::unique_ptr<StoredMatrix> at(int layer, int expert, Projection projection) const override {
    const Module module = module_at(layer, expert, projection);
    Reading reading = read_module_bytes(module);
    check_shape_of(module, reading, projection);
    return plane_matrix(module.name, std::move(reading.planes));
  }

  std::optional<std::vector<float>> bias(int layer, int expert, Projection projection) const override {
    const Module module = module_at(layer, expert, projection);
    auto values = read_bias(module);
    const int64_t wanted = projection == Projection::kDown ? hidden_ : inter_;
    if (values && std::ssize(*values) != wanted)
      fail("{}: expected {} values for the {} projection, found {}", module.find({"bias"}).name(), wanted,
           name_of(projection), values->size());
    return values;
  }

  bool owns(std::string_view tensor) const override { return expert_name(tensor).has_value(); }

  std::string module_name(int layer, int expert, Projection projection) const override {
    const LayerStyle& style = style_of(layer);
    if (checkpoint_.is_gguf()) return published_expert(checkpoint_.gguf_family(), layer, expert, projection);
    if (style.fused) return text("{}.{}.{}_proj", style.stem, expert, name_of(projection));
    return text("{}.{}.{}", style.stem, expert, style.names[static_cast<int>(projection)]);
  }

 private:
  // Where a family has another word for a tensor that is named like an expert's, it is none.
  std::optional<ExpertName> expert_name(std::string_view tensor) const {
    if (checkpoint_.is_gguf() && published_name(checkpoint_.gguf_family(), tensor)) return std::nullopt;
    return parse_expert_name(tensor);
  }
  void index();
  void settle_experts();
  void check_layer(int layer, const LayerStyle& style);
  void check_shape_of(const Module& module, const Reading& reading, Projection projection) const;
  Module module_at(int layer, int expert, Projection projection) const;

  const LayerStyle& style_of(int layer) const {
    const auto found = styles_.find(layer);
    if (found == styles_.end()) fail("{}: layer {} has no routed experts", checkpoint_.path(), layer);
    return found->second;
  }

  std::span<const ExpertTensor> part(int layer, int expert, NamedPart named) const {
    const ExpertTensor wanted{
        .layer = layer, .expert = expert, .part = static_cast<uint8_t>(named), .suffix = {}};
    const auto [first, last] =
        std::equal_range(tensors_.begin(), tensors_.end(), wanted,
                         [](const ExpertTensor& a, const ExpertTensor& b) { return key(a) < key(b); });
    return {first, last};
  }

  const Checkpoint& checkpoint_;
  const ModelConfig& config_;
  InputType type_;
  std::vector<ExpertTensor> tensors_;  // by layer, expert, part
  std::map<int, LayerStyle> styles_;
  std::string_view dialect_;
  int experts_ = 0;
  int64_t hidden_ = 0, inter_ = 0;
};

void CheckpointExperts::index() {
  int beyond = 0;
  for (const Tensor& tensor : checkpoint_.tensors()) {
    const auto name = expert_name(tensor.name);
    if (!name || name->extra) continue;
    if (config_.layers > 0 && name->layer >= config_.layers) {
      ++beyond;
      continue;
    }
    tensors_.push_back({name->layer, name->expert, static_cast<uint8_t>(name->part), name->suffix, &tensor});
    LayerStyle& style = styles_[name->layer];
    if (style.stem.empty()) style.stem = name->stem;
    if (style.stem != name->stem)
      fail("{}: layer {} has experts under two names, {} and {}", checkpoint_.path(), name->layer, style.stem,
           name->stem);
    (name->expert < 0 ? style.fused : style.per_expert) = true;
    if (name->part != NamedPart::kGateUp) style.names[static_cast<int>(name->part)] = name->projection;
    if (style.fused && style.per_expert)
      fail("{}: layer {} has experts both fused and one by one ({})", checkpoint_.path(), name->layer,
           shown(tensor.name));
  }
  std::ranges::sort(tensors_, [](const ExpertTensor& a, const ExpertTensor& b) { return key(a) < key(b); });
  if (!tensors_.empty()) return;
  if (beyond > 0)
    fail_as(ErrorKind::kUnsupported,
            "{}: the only routed experts are in layers from {} on, which config says is the end",
            checkpoint_.path(), config_.layers);
  fail_as(ErrorKind::kUnsupported,
          "{}: no routed experts: none of {} tensors is named like "
          "model.layers.0.mlp.experts.0.gate_proj.weight, "
          "nor like another known style",
          checkpoint_.path(), checkpoint_.tensors().size());
}

// The number of experts: the config's, or what the first layer holds.
void CheckpointExperts::settle_experts() {
  int64_t found = 0;
  for (const ExpertTensor& entry : tensors_) {
    if (entry.layer != tensors_.front().layer) break;
    const auto& shape = entry.tensor->shape;
    found = std::max<int64_t>(found, entry.expert >= 0 ? int64_t{entry.expert} + 1
                                     : shape.empty()   ? 0
                                                       : shape[0]);
  }
  const int64_t experts = config_.experts > 0 ? config_.experts : found;
  if (experts < 1 || experts > INT32_MAX)
    fail("{}: {} experts in layer {}", checkpoint_.path(), experts, tensors_.front().layer);
  experts_ = static_cast<int>(experts);
  for (const ExpertTensor& entry : tensors_) {
    if (entry.expert >= experts_)
      fail("{}: expert {}, but {} has {} experts", shown(entry.tensor->name), entry.expert,
           config_.experts > 0 ? "config" : "the first layer", experts_);
    const auto& shape = entry.tensor->shape;
    if (entry.expert < 0 && (shape.empty() || shape[0] != experts_))
      fail("{}: expected {} experts, found {}", shown(entry.tensor->name), experts_, describe(*entry.tensor));
  }
}

Module CheckpointExperts::module_at(int layer, int expert, Projection projection) const {
  const LayerStyle& style = style_of(layer);
  if (expert < 0 || expert >= experts_)
    fail("{}: expert {} asked for, layer {} has {}", checkpoint_.path(), expert, layer, experts_);
  Module module{
      .name = {}, .tensors = part(layer, style.fused ? -1 : expert, part_of(projection)), .config = &config_};
  if (style.fused) {
    module.expert = expert;
    module.transposed = style.style.transposed;
    if (module.tensors.empty() && projection != Projection::kDown) {
      module.tensors = part(layer, -1, NamedPart::kGateUp);
      const bool gate = projection == Projection::kGate;
      if (style.style.interleaved) {
        module.rows = gate ? RowChoice::kEven : RowChoice::kOdd;
      } else {
        module.rows = gate ? RowChoice::kFirstHalf : RowChoice::kSecondHalf;
      }
    }
  }
  if (module.tensors.empty())
    fail("{}: layer {}: expert {} has no {} projection under {}{}", checkpoint_.path(), layer, expert,
         name_of(projection), style.stem,
         config_.experts > 0 ? text("; the config says there are {} experts", config_.experts) : "");
  module.name = parse_expert_name(module.tensors.front().tensor->name)->module;
  if (style.fused) module.name += text("[{}]", expert);
  return module;
}

void CheckpointExperts::check_shape_of(const Module& module, const Reading& reading,
                                       Projection projection) const {
  const bool down = projection == Projection::kDown;
  const int64_t n = down ? hidden_ : inter_, k = down ? inter_ : hidden_;
  if (reading.planes.n != n || reading.planes.k != k)
    fail("{}: expected [{}, {}] for the {} projection (hidden {}, inter {}), found [{}, {}]", module.name, n,
         k, name_of(projection), hidden_, inter_, reading.planes.n, reading.planes.k);
}

void CheckpointExperts::check_layer(int layer, const LayerStyle& style) {
  const int count = style.fused ? 1 : experts_;  // slices of one tensor are alike
  for (int expert = 0; expert < count; ++expert) {
    for (const Projection projection : kProjections) {
      const Module module = module_at(layer, expert, projection);
      Reading reading = read_module(module);
      if (checkpoint_.is_gguf()) {  // also its plain types
        reading.dialect = "gguf";
        reading.type = InputType::kGguf;
      }
      if (reading.planes.n < 1 || reading.planes.k < 1)
        fail("{}: expected at least one row and one column, found {}", module.name,
             describe(*module.tensors.front().tensor));
      if (dialect_.empty()) {
        dialect_ = reading.dialect;
        inter_ = config_.inter > 0 ? config_.inter : reading.planes.n;
        hidden_ = config_.hidden > 0 ? config_.hidden : reading.planes.k;
      }
      if (type_ != InputType::kAuto && type_ != reading.type)
        fail("{}: input type {} asked for, the tensors are {} ({})", module.name, input_name(type_),
             reading.dialect, describe(*module.tensors.front().tensor));
      check_shape_of(module, reading, projection);
    }
  }
}

const Tensor* first_kt_tensor(const Checkpoint& checkpoint) {
  const auto found = std::ranges::find_if(checkpoint.tensors(), [](const Tensor& tensor) {
    return parse_kt_tensor_name(tensor.name).has_value();
  });
  return found == checkpoint.tensors().end() ? nullptr : &*found;
}

}  // namespace

std::string_view name_of(Projection projection) {
  switch (projection) {
    case Projection::kGate:
      return "gate";
    case Projection::kUp:
      return "up";
    case Projection::kDown:
      break;
  }
  return "down";
}

InputType input_type_named(std::string_view name) {
  std::string known;
  for (const InputName& row : kInputNames) {
    if (row.name == name) return row.type;
    known += text_of(known.empty() ? "{}" : ", {}", row.name);
  }
  fail("input type '{}': expected one of {}", name, known);
}

// In blocks whose codes stay in L2; a block that the asked rows cut is dequantised beside and copied.
void StoredMatrix::values(int64_t first, int64_t count, float* out) const {
  KT_CHECK(first >= 0 && count >= 0 && first <= n - count, "{}: rows {} to {} of {}", name, first,
           first + count, n);
  const int64_t step = std::max<int64_t>(format.span.n, 64 / format.span.n * format.span.n);
  const int64_t last = std::min(n, ceil_div(first + count, format.span.n) * format.span.n);
  std::vector<float> beside;
  for (int64_t begin = first / format.span.n * format.span.n; begin < last; begin += step) {
    const int64_t end = std::min(begin + step, last);
    const Matrix block = rows(begin, end - begin);
    const int64_t from = std::max(begin, first), to = std::min(end, first + count);
    float* target = out + (from - first) * k;
    if (from == begin && to == end) {
      dequantise(block.view(), {target, static_cast<size_t>((to - from) * k)});
      continue;
    }
    beside.resize(static_cast<size_t>((end - begin) * k));
    dequantise(block.view(), beside);
    std::copy_n(beside.data() + (from - begin) * k, (to - from) * k, target);
  }
}

std::optional<std::vector<float>> ExpertSource::bias(int, int, Projection) const { return std::nullopt; }

std::unique_ptr<ExpertSource> open_experts(const Checkpoint& checkpoint, InputType type) {
  if (const Tensor* const converted = first_kt_tensor(checkpoint))
    fail("{}: was converted for the CPU already ({}): give the checkpoint it was made from",
         checkpoint.path(), shown(converted->name));
  return std::make_unique<CheckpointExperts>(checkpoint, type);
}

std::unique_ptr<ExpertSource> open_own_experts(const Checkpoint& checkpoint) {
  return checkpoint.has_kt_experts() ? open_kt_weights(checkpoint.path()) : open_experts(checkpoint);
}

std::shared_ptr<const ExpertSource> open_experts(const std::string& path, GgufFamilies families) {
  struct Opened {
    Checkpoint checkpoint;
    std::unique_ptr<ExpertSource> source;
  };
  if (has_kt_layers(path)) return open_kt_weights(path);
  const auto opened = std::make_shared<Opened>(Opened{.checkpoint = Checkpoint(path, families)});
  if (opened->checkpoint.has_kt_experts()) return open_kt_weights(path);
  opened->source = open_experts(opened->checkpoint);
  return {opened, opened->source.get()};
}

}  // namespace kt::inline weights
