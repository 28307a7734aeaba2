#include "weights/kt/kt_arrays.h"

#include "base/error.h"
#include "base/text.h"

namespace kt::inline weights {
namespace {

constexpr std::string_view kVersion = "1";

std::string layout_of(int bits) { return text("amx-int{}", bits); }

int64_t number_in(const Json& json, const char* key, int64_t lowest, int64_t highest, std::string_view file) {
  const auto found = json.find(key);
  if (found == json.end() || !found->is_number_integer())
    fail("{}: \"{}\" is missing or not a whole number", file, key);
  const bool huge = found->is_number_unsigned() && found->get<uint64_t>() > static_cast<uint64_t>(highest);
  const int64_t value = huge ? highest : found->get<int64_t>();
  if (huge || value < lowest || value > highest)
    fail("{}: \"{}\" is {}, expected {} to {}", file, key, found->dump(), lowest, highest);
  return value;
}

std::string text_in(const Json& json, const char* key, std::string_view file) {
  const auto found = json.find(key);
  if (found == json.end() || !found->is_string()) fail("{}: \"{}\" is missing or not text", file, key);
  return found->get<std::string>();
}

}  // namespace

KtShape kt_part_shape(const KtModel& model, const KtName& name) {
  const int64_t part = model.inter / model.parts;
  const bool rows_are_hidden = (name.projection == Projection::kDown) != name.backward;
  return rows_are_hidden ? kt_shape(model.bits, model.hidden, part)
                         : kt_shape(model.bits, part, model.hidden);
}

bool kt_padded(const KtModel& model) {
  return kt_part_shape(model, {.projection = Projection::kGate}).padded() ||
         kt_part_shape(model, {.projection = Projection::kDown}).padded();
}

std::vector<KtName> kt_expert_arrays(const KtModel& model, int layer, int expert) {
  std::vector<KtName> out;
  for (const Projection projection : kProjections) {
    for (int backward = 0; backward <= (model.backward ? 1 : 0); ++backward) {
      for (int part = 0; part < model.parts; ++part) {
        KtName name{.layer = layer,
                    .projection = projection,
                    .backward = backward == 1,
                    .expert = expert,
                    .part = part};
        out.push_back(name);
        name.scale = true;
        out.push_back(name);
      }
    }
  }
  return out;
}

uint64_t kt_array_bytes(const KtModel& model, const KtName& name) {
  const KtShape shape = kt_part_shape(model, name);
  return name.scale ? shape.scale_bytes : shape.weight_bytes;
}

TensorSpec kt_tensor_spec(const KtModel& model, const KtName& name) {
  const auto bytes = static_cast<int64_t>(kt_array_bytes(model, name));
  if (name.scale) return {.name = kt_tensor_name(name), .dtype = Dtype::kF32, .shape = {bytes / 4}};
  return {.name = kt_tensor_name(name), .dtype = Dtype::kI8, .shape = {bytes}};
}

TensorSpec kt_file_spec(const KtModel& model, const KtName& name) {
  const uint64_t bytes = kt_array_bytes(model, name);
  return {.name = kt_file_name(name, model.bits, bytes),
          .dtype = Dtype::kI8,
          .shape = {static_cast<int64_t>(bytes)}};
}

Metadata kt_metadata(const KtModel& model, const std::vector<KtName>& arrays) {
  Metadata out = {{"kt.format", std::string(kVersion)},
                  {"kt.layout", layout_of(model.bits)},
                  {"kt.parts", text("{}", model.parts)},
                  {"kt.hidden", text("{}", model.hidden)},
                  {"kt.inter", text("{}", model.inter)}};
  const auto add = [&](const char* key, const std::string& value) {
    if (!value.empty()) out[key] = value;
  };
  add("kt.rounding", model.rounding);
  add("kt.source", model.source);
  add("kt.tool", model.tool);
  for (const KtName& name : arrays) {
    if (name.scale) continue;
    const KtShape shape = kt_part_shape(model, name);
    if (shape.padded()) out["kt.shape." + kt_tensor_name(name)] = text("{},{}", shape.n, shape.k);
  }
  return out;
}

std::string kt_facts(const KtModel& model, const Json& origin) {
  Json json = {{"format", kVersion},         {"layout", layout_of(model.bits)},
               {"bits", model.bits},         {"hidden", model.hidden},
               {"inter", model.inter},       {"parts", model.parts},
               {"backward", model.backward}, {"rounding", model.rounding},
               {"source", model.source},     {"tool", model.tool}};
  if (!origin.is_null()) json["origin"] = origin;
  return json.dump(2, ' ', true, Json::error_handler_t::replace) + "\n";
}

KtModel parse_kt_facts(const Json& json, std::string_view file) {
  if (!json.is_object()) fail("{}: not an object", file);
  if (const std::string version = text_in(json, "format", file); version != kVersion)
    fail_as(ErrorKind::kUnsupported, "{}: format version {}, this program knows {}", file, version, kVersion);
  constexpr int64_t kMost = int64_t{1} << 31;
  KtModel out{.bits = static_cast<int>(number_in(json, "bits", 4, 8, file)),
              .hidden = number_in(json, "hidden", 1, kMost, file),
              .inter = number_in(json, "inter", 1, kMost, file),
              .parts = static_cast<int>(number_in(json, "parts", 1, kLargestKtNumber, file)),
              .backward = false,
              .rounding = text_in(json, "rounding", file),
              .source = text_in(json, "source", file),
              .tool = text_in(json, "tool", file)};
  if (const auto found = json.find("backward"); found != json.end() && found->is_boolean())
    out.backward = found->get<bool>();
  if (out.bits != 4 && out.bits != 8) fail("{}: {} bits, expected 4 or 8", file, out.bits);
  if (out.inter % out.parts != 0) fail("{}: {} parts do not divide {}", file, out.parts, out.inter);
  return out;
}

}  // namespace kt::inline weights
