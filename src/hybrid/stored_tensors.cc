#include "hybrid/stored_tensors.h"

#include <algorithm>
#include <charconv>
#include <utility>

#include "base/error.h"
#include "hybrid/shared_experts.h"
#include "models/families.h"
#include "weights/stored_names.h"

namespace kt::inline hybrid {
namespace {

std::string replaced(std::string name, std::string_view from, std::string_view to) {
  const size_t at = name.find(from);
  return at == std::string::npos ? name : name.replace(at, from.size(), to);
}

// What a name may be in files: a model inside a larger one, blocks that older files call otherwise, a tied head.
std::vector<std::string> spellings(std::string_view name) {
  std::vector<std::string> out;
  const std::string plain(name);
  const auto add = [&](const std::string& one) {
    if (std::ranges::find(out, one) == out.end()) out.push_back(one);
  };
  for (const std::string& inner :
       {plain, replaced(plain, ".mlp.", ".block_sparse_moe."), replaced(plain, ".mlp.", ".feed_forward."),
        replaced(plain, "lm_head", "model.embed_tokens")}) {
    add(inner);
    add("language_model." + inner);
    if (inner.starts_with("model.")) add("model.language_model." + inner.substr(6));
  }
  return out;
}

int number_in(std::string_view word) {
  int out = -1;
  const auto [rest, error] = std::from_chars(word.data(), word.data() + word.size(), out);
  return error == std::errc() && rest == word.data() + word.size() ? out : -1;
}

}  // namespace

StoredTensors::StoredTensors(const std::string& path) : checkpoint_(path, gguf_families()) {
  for (LinearModule& linear : find_linears(checkpoint_, [](std::string_view) { return false; })) {
    std::string name = linear.module;
    linears_.emplace(std::move(name), std::move(linear));
  }
}

std::vector<std::string> StoredTensors::names() const {
  std::vector<std::string> out;
  std::vector<const Tensor*> taken;
  for (const auto& [module, linear] : linears_) {
    out.push_back(module + ".weight");
    taken.insert(taken.end(), linear.tensors.begin(), linear.tensors.end());
  }
  std::ranges::sort(taken);
  for (const Tensor& tensor : checkpoint_.tensors())
    if (!std::ranges::binary_search(taken, &tensor)) out.push_back(tensor.name);
  std::ranges::sort(out);
  return out;
}

const ExpertSource* StoredTensors::experts() const {
  const std::lock_guard lock(mutex_);
  if (!std::exchange(looked_, true)) try {
      experts_ = shared_experts(checkpoint_.path());
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kUnsupported) throw;  // it has none
    }
  return experts_.get();
}

StoredTensors::Found StoredTensors::find_exactly(const std::string& name) const {
  Found out;
  constexpr std::string_view kWeight = ".weight";
  const std::string stored = stored_name(checkpoint_, name);
  if (name.ends_with(kWeight)) {
    const auto linear = linears_.find(
        linear_name(checkpoint_, std::string_view(name).substr(0, name.size() - kWeight.size())));
    if (linear != linears_.end()) out.linear = &linear->second;
  }
  if (!out.linear) out.tensor = checkpoint_.find(stored);
  return out;
}

// "model.layers.3.mlp.experts.7.up_proj.weight", "model.layers.3.mlp.experts.gate_up_proj".
StoredTensors::Found StoredTensors::find_experts(std::string_view name) const {
  constexpr std::string_view kExperts = ".experts.", kLayers = "layers.";
  const size_t at = name.find(kExperts), layers = name.find(kLayers);
  if (at == name.npos || layers == name.npos || layers > at) return {};
  Found out;
  std::string_view rest = name.substr(at + kExperts.size());
  const size_t begin = layers + kLayers.size();
  const int layer = number_in(name.substr(begin, name.find('.', begin) - begin));
  if (const size_t dot = rest.find('.'); dot != rest.npos) {
    out.expert = number_in(rest.substr(0, dot));
    rest.remove_prefix(dot + 1);
    if (out.expert < 0 || !rest.ends_with(".weight")) return {};
    rest.remove_suffix(std::string_view(".weight").size());
  }
  constexpr std::pair<std::string_view, Projection> kWords[] = {
      {"gate_proj", Projection::kGate}, {"w1", Projection::kGate},        {"up_proj", Projection::kUp},
      {"w3", Projection::kUp},          {"down_proj", Projection::kDown}, {"w2", Projection::kDown}};
  for (const auto& [word, projection] : kWords)
    if (rest == word && (out.expert >= 0 || projection == Projection::kDown)) out.projections = {projection};
  if (rest == "gate_up_proj" && out.expert < 0) out.projections = {Projection::kGate, Projection::kUp};
  const ExpertSource* const source = out.projections.empty() ? nullptr : experts();
  if (!source || out.expert >= source->experts() || std::ranges::count(source->layers(), layer) == 0)
    return {};
  out.layer = layer;
  return out;
}

StoredTensors::Found StoredTensors::find(std::string_view name) const {
  // A GGUF file's tensor may answer to a name that its matrix was not published with.
  Found tensor;
  for (const std::string& spelling : spellings(name)) {
    const Found one = find_exactly(spelling);
    if (one.linear) return one;
    if (!tensor.is_there()) tensor = one;
  }
  return tensor.is_there() ? tensor : find_experts(name);
}

StoredTensors::Found StoredTensors::found(std::string_view name) const {
  const Found out = find(name);
  if (!out.is_there()) checkpoint_.at(stored_name(checkpoint_, name));  // says what it has
  return out;
}

bool StoredTensors::has(std::string_view name) const { return find(name).is_there(); }

StoredTensors::Description StoredTensors::describe(std::string_view name) const {
  const Found at = found(name);
  const auto file_of = [&](const Tensor& tensor) {
    return checkpoint_.files()[static_cast<size_t>(tensor.file)];
  };
  if (at.linear) {
    const auto matrix = open_linear(checkpoint_, *at.linear);
    return {{matrix->n, matrix->k}, name_of(matrix->format), file_of(*at.linear->main)};
  }
  if (at.tensor) {
    const bool blocks = at.tensor->dtype == Dtype::kGguf;
    const std::string description = kt::describe(*at.tensor);
    return {at.tensor->shape,
            blocks ? description.substr(0, description.find(' ')) : std::string(name_of(at.tensor->dtype)),
            file_of(*at.tensor)};
  }
  const ExpertSource& source = *experts();
  const auto matrix = source.at(at.layer, std::max(at.expert, 0), at.projections.front());
  if (at.expert >= 0) return {{matrix->n, matrix->k}, name_of(matrix->format), ""};
  return {{source.experts(), matrix->n * std::ssize(at.projections), matrix->k}, name_of(matrix->format), ""};
}

void StoredTensors::values(std::string_view name, float* out) const {
  const Found at = found(name);
  if (at.linear) {
    const auto matrix = open_linear(checkpoint_, *at.linear);
    matrix->values(0, matrix->n, out);
  } else if (at.tensor) {
    for (const std::string& spelling : spellings(name)) {
      if (checkpoint_.find(stored_name(checkpoint_, spelling)) != at.tensor) continue;
      std::ranges::copy(read_vector(checkpoint_, spelling), out);
      break;
    }
  } else {
    const ExpertSource& source = *experts();
    for (int e = std::max(at.expert, 0), end = at.expert < 0 ? source.experts() : e + 1; e < end; ++e)
      for (const Projection projection : at.projections) {
        const auto matrix = source.at(at.layer, e, projection);
        matrix->values(0, matrix->n, out);
        out += matrix->n * matrix->k;
      }
  }
}

std::unique_ptr<StoredMatrix> StoredTensors::matrix(std::string_view module) const {
  const std::string name = std::string(module) + ".weight";
  const Found at = found(name);
  if (at.linear) return open_linear(checkpoint_, *at.linear);
  if (at.layer >= 0) return experts()->at(at.layer, at.expert, at.projections.front());
  fail("{}: expected a matrix, found {}", name, kt::describe(*at.tensor));
}

}  // namespace kt::inline hybrid
