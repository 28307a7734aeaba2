#include "models/config_reader.h"

#include <cmath>

#include "text/shown.h"

namespace kt::inline models {
namespace {

std::string brief(const Json& value) {
  if (value.is_object()) return "an object";
  if (value.is_array()) return text("a list of {}", value.size());
  return shown(value.dump(-1, ' ', false, Json::error_handler_t::replace));
}

}  // namespace

ConfigReader::ConfigReader(const Json& config, std::string_view name, KeyNames key_names)
    : file_(name),
      key_names_(std::move(key_names)),
      // Which refuses anything but objects on the way down.
      model_(read_model_config(config, name, key_names_)) {
  sections_ = {{&config, ""}};
  for (bool deeper = true; deeper;) {
    deeper = false;
    for (const std::string_view key : {"thinker_config", "text_config", "language_config", "llm_config"}) {
      const auto inner = sections_.front().object->find(key);
      if (inner == sections_.front().object->end() || !inner->is_object()) continue;
      sections_.insert(sections_.begin(), {&*inner, text("{}{}.", sections_.front().path, key)});
      deeper = true;
      break;
    }
  }
}

std::pair<const Json*, const ConfigReader::Section*> ConfigReader::find(std::string_view key) const {
  for (const Section& section : sections_) {
    const auto found = section.object->find(key);
    if (found != section.object->end() && !found->is_null()) return {&*found, &section};
  }
  return {nullptr, &sections_.front()};
}

std::string ConfigReader::place(std::string_view key) const {
  const std::string whole = text("{}{}", find(key).second->path, key);
  return text("{}: {}", file_, key_names_ ? key_names_(whole) : whole);
}

void ConfigReader::wrong(std::string_view key, std::string_view expected) const {
  const Json* const value = find(key).first;
  fail("{} is {}, expected {}", place(key), value == nullptr ? "missing" : brief(*value), expected);
}

void ConfigReader::missing(std::string_view key) const { fail("{} is missing", place(key)); }

void ConfigReader::unsupported(std::string_view key, std::string_view known) const {
  const Json* const value = find(key).first;
  fail_as(ErrorKind::kUnsupported, "{} is {}; supported: {}", place(key),
          value == nullptr ? "missing" : brief(*value), known);
}

int ConfigReader::integer(std::string_view key) const {
  if (!has(key)) missing(key);
  return integer(key, 0, 1);
}

int ConfigReader::integer(std::string_view key, int fallback, int least) const {
  const Json* const value = find(key).first;
  if (value == nullptr) return fallback;
  const auto fits = [&](auto number) { return number >= least && number <= kMost; };
  const bool good = value->is_number_unsigned()  ? fits(static_cast<double>(value->get<uint64_t>()))
                    : value->is_number_integer() ? fits(value->get<int64_t>())
                                                 : false;
  if (!good) wrong(key, text("a whole number from {} to {}", least, kMost));
  return value->get<int>();
}

double ConfigReader::number(std::string_view key) const {
  if (!has(key)) missing(key);
  return number(key, 0);
}

double ConfigReader::number(std::string_view key, double fallback) const {
  const Json* const value = find(key).first;
  if (value == nullptr) return fallback;
  if (!value->is_number() || !std::isfinite(value->get<double>())) wrong(key, "a number");
  return value->get<double>();
}

bool ConfigReader::boolean(std::string_view key, bool fallback) const {
  const Json* const value = find(key).first;
  if (value == nullptr) return fallback;
  if (!value->is_boolean()) wrong(key, "true or false");
  return value->get<bool>();
}

bool ConfigReader::truth(std::string_view key, bool fallback) const {
  const Json* const value = find(key).first;
  return value != nullptr && value->is_number() ? number(key) != 0 : boolean(key, fallback);
}

std::string ConfigReader::string(std::string_view key, std::string_view fallback) const {
  const Json* const value = find(key).first;
  if (value == nullptr) return std::string(fallback);
  if (!value->is_string()) wrong(key, "a string");
  return value->get<std::string>();
}

std::vector<std::string> ConfigReader::strings(std::string_view key) const {
  const Json* const value = find(key).first;
  if (value == nullptr) return {};
  if (!value->is_array()) wrong(key, "a list of strings");
  for (const Json& each : *value)
    if (!each.is_string()) wrong(key, "a list of strings");
  return value->get<std::vector<std::string>>();
}

std::vector<double> ConfigReader::numbers(std::string_view key) const {
  const Json* const value = find(key).first;
  if (value == nullptr) return {};
  if (!value->is_array()) wrong(key, "a list of numbers");
  for (const Json& each : *value)
    if (!each.is_number() || !std::isfinite(each.get<double>())) wrong(key, "a list of numbers");
  return value->get<std::vector<double>>();
}

std::optional<ConfigReader> ConfigReader::object(std::string_view key) const {
  const auto [value, section] = find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_object()) wrong(key, "an object");
  ConfigReader out;
  out.file_ = file_;
  out.key_names_ = key_names_;
  out.sections_ = {{value, text("{}{}.", section->path, key)}};
  return out;
}

int ConfigReader::known(int value, std::string_view key) const {
  if (value == 0) has(key) ? wrong(key, "a whole number of at least 1") : missing(key);
  if (value > kMost) wrong(key, text("at most {}", kMost));
  return value;
}

}  // namespace kt::inline models
