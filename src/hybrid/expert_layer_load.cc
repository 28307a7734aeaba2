// Where a layer's weights come from: files under a path, or values in memory.
#include <algorithm>

#include "base/error.h"
#include "base/mapped_faults.h"
#include "hybrid/expert_codes.h"
#include "hybrid/expert_layer_state.h"
#include "hybrid/expert_values.h"
#include "hybrid/shared_experts.h"
#include "models/load_experts.h"

namespace kt::inline hybrid {
namespace {

ExpertsOptions options_for(const ExpertLayerOptions& o) {
  return {.activation = o.activation, .precision = o.precision, .max_tokens = o.max_tokens};
}

Experts loaded_from(const ExpertSource& source, const ExpertLayerOptions& o, CpuTeam& team,
                    std::span<const int64_t> map) {
  Experts experts(team.pool(), team.workspace(), o.shape, experts_options(source, o.layer, options_for(o)));
  fill_experts(*team.pool(), fill_of(source, o.layer, team.pool()->threads()), experts, map);
  return experts;
}

void check_shape_of(const ExpertSource& source, const ExpertLayerOptions& o) {
  if (source.hidden() != o.shape.hidden || source.inter() != o.shape.inter)
    fail("layer {}: expected experts of hidden {} and inter {}, {} has hidden {} and inter {}", o.layer,
         o.shape.hidden, o.shape.inter, o.weights, source.hidden(), source.inter());
}

// As many parts as pools, or the most below that cut `inter` where kernels can (multiples of 16).
int parts_to_save(int inter, int nodes) {
  int parts = nodes;
  while (parts > 1 && (inter % parts != 0 || inter / parts % 16 != 0)) --parts;
  return parts;
}

std::string saved_methods() {
  std::string out;
  for (const WeightMethod& method : weight_methods())
    if (method.kt_bits > 0) out += text_of(out.empty() ? "{}" : ", {}", method.name);
  return out;
}

}  // namespace

// Work in flight on the team is done before its weights go, and what runs at once on other threads too.
void ExpertLayer::State::replace(Experts loaded, std::span<const int64_t> physical_to_logical,
                                 std::shared_ptr<const ExpertSource> from) {
  std::vector<int64_t> order(physical_to_logical.begin(), physical_to_logical.end());
  for (int64_t i = std::ssize(order); i < options.shape.experts; ++i) order.push_back(i);
  const auto swap = [&] {
    const std::unique_lock lock(in_use);
    experts.emplace(std::move(loaded));
    map.swap(order);
    if (from) source = std::move(from);
  };
  if (team->inside()) return swap();
  std::exception_ptr error;
  const uint64_t ticket = team->submit([&] {
    try {
      swap();
    } catch (...) {
      error = std::current_exception();
    }
  });
  team->wait(ticket);
  if (error) std::rethrow_exception(error);
}

void ExpertLayer::load(std::span<const int64_t> physical_to_logical) {
  State& s = *state_;
  const ExpertLayerOptions& o = s.options;
  if (o.weights.empty()) fail("layer {}: no path to load weights from was given", o.layer);
  std::shared_ptr<const ExpertSource> source = shared_experts(o.weights);
  check_method(*s.method, *source, o.layer, o.weights);
  check_shape_of(*source, o);
  const auto rounded = rounded_for(*s.method, *source, o.layer, o.weights);
  Experts experts = loaded_from(rounded ? *rounded : *source, o, *s.team, physical_to_logical);
  check_mapped_files();
  s.replace(std::move(experts), physical_to_logical, std::move(source));
}

void ExpertLayer::load_values(const ExpertValues& values, std::span<const int64_t> physical_to_logical) {
  State& s = *state_;
  const ExpertLayerOptions& o = s.options;
  MethodFormats formats = formats_of(*s.method, o.shape.hidden, o.shape.inter, o.group_size, o.zero_point);
  const int parts = parts_to_save(o.shape.inter, s.team->pool()->nodes());
  if (o.save) {
    if (s.method->kt_bits == 0)
      fail("layer {}: weights of method {} cannot be saved; those of {} can", o.layer, s.method->name,
           saved_methods());
    if (o.weights.empty()) fail("layer {}: no path to save weights under was given", o.layer);
    if (parts > 1) formats.down.span.k = o.shape.inter / parts;  // what is saved is what runs
  }
  const auto source = source_of_values(values, o.shape, formats, o.layer);
  Experts experts = loaded_from(*source, o, *s.team, physical_to_logical);
  if (o.save) {
    save_kt_layer(*source, {.folder = o.weights, .bits = s.method->kt_bits, .parts = parts}, *s.team->pool());
    forget_experts(o.weights);
  }
  s.replace(std::move(experts), physical_to_logical, nullptr);
}

void ExpertLayer::load_codes(const ExpertCodes& codes, std::span<const int64_t> physical_to_logical) {
  State& s = *state_;
  const auto source = source_of_codes(codes, s.options, *s.method);
  s.replace(loaded_from(*source, s.options, *s.team, physical_to_logical), physical_to_logical, nullptr);
}

}  // namespace kt::inline hybrid
