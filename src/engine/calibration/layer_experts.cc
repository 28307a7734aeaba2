#include "engine/calibration/layer_experts.h"

#include <algorithm>

#include "engine/calibration/matrix_rounding.h"
#include "models/load_experts.h"
#include "weights/requantise.h"

namespace kt::inline engine {
namespace {

// One expert's matrices, rounded ones and others, in formats that run: one for gate and up.
class ExpertMatrices {
 public:
  ExpertMatrices(const ExpertSource& source, const RoundedLayer& rounded, const PackedSpec& spec, int expert)
      : source_(source), rounded_(rounded), spec_(spec), expert_(expert) {
    for (const Projection projection : kProjections)
      formats_[static_cast<size_t>(projection)] =
          is_rounded(projection) ? RunnableView::format_of(packed_format(spec)) : stored(projection)->format;
    if (!(formats_[0] == formats_[1])) formats_[0] = formats_[1] = format_named("f32");
  }
  const Format& gate_up() const { return formats_[0]; }
  const Format& down() const { return formats_[2]; }
  std::unique_ptr<StoredMatrix> open(Projection projection) const {
    std::unique_ptr<StoredMatrix> matrix;
    if (is_rounded(projection)) {
      const std::string module = name(projection);
      matrix = runnable(rounded_.at(module, spec_).value(), module);
    } else {
      matrix = stored(projection);
    }
    const Format& format = formats_[static_cast<size_t>(projection)];
    return matrix->format == format ? std::move(matrix) : requantised(std::move(matrix), format);
  }

 private:
  std::string name(Projection projection) const {
    return source_.module_name(rounded_.figures().layer, expert_, projection);
  }
  bool is_rounded(Projection projection) const { return rounded_.has(name(projection)); }
  std::unique_ptr<StoredMatrix> stored(Projection projection) const {
    return source_.at(rounded_.figures().layer, expert_, projection);
  }

  const ExpertSource& source_;
  const RoundedLayer& rounded_;
  const PackedSpec& spec_;
  int expert_;
  Format formats_[3];
};

}  // namespace

LayerExperts::LayerExperts(const std::shared_ptr<Pool>& pool, const ExpertSource& source,
                           const RoundedLayer& rounded, const PackedSpec& spec, const ExpertsOptions& rest) {
  const int layer = rounded.figures().layer;
  const auto experts = static_cast<size_t>(source.experts());
  for (int e = 0; e < source.experts(); ++e) {
    const ExpertMatrices matrices(source, rounded, spec, e);
    auto group = std::ranges::find_if(groups_, [&](const Group& g) {
      return g.gate_up == matrices.gate_up() && g.down == matrices.down();
    });
    if (group == groups_.end())
      group = groups_.insert(
          group, {matrices.gate_up(), matrices.down(), {}, std::vector<int32_t>(experts, -1), nullptr});
    group->number[static_cast<size_t>(e)] = static_cast<int32_t>(group->members.size());
    group->members.push_back(e);
  }
  const auto workspace = std::make_shared<Workspace>();
  for (Group& group : groups_) {
    ExpertsOptions options = rest;
    options.gate = options.up = group.gate_up;
    options.down = group.down;
    group.experts = std::make_unique<Experts>(pool, workspace,
                                              ExpertsShape{.experts = static_cast<int>(group.members.size()),
                                                           .hidden = static_cast<int>(source.hidden()),
                                                           .inter = static_cast<int>(source.inter())},
                                              options);
    run_items(*pool, std::ssize(group.members), [&](int64_t i) {
      const int expert = group.members[static_cast<size_t>(i)];
      const ExpertMatrices matrices(source, rounded, spec, expert);
      std::unique_ptr<StoredMatrix> opened[3];
      std::optional<std::vector<float>> bias[3];
      for (const Projection projection : kProjections) {
        opened[static_cast<size_t>(projection)] = matrices.open(projection);
        bias[static_cast<size_t>(projection)] = source.bias(layer, expert, projection);
      }
      const auto at = [&](size_t p) { return bias[p] ? bias[p]->data() : nullptr; };
      group.experts->load(static_cast<int>(i), ExpertRows{.gate = reader_of(*opened[0]),
                                                          .up = reader_of(*opened[1]),
                                                          .down = reader_of(*opened[2]),
                                                          .gate_bias = at(0),
                                                          .up_bias = at(1),
                                                          .down_bias = at(2)});
    });
  }
}

void LayerExperts::forward(ForwardArgs args, std::vector<float>& scratch) const {
  if (groups_.size() == 1) return groups_.front().experts->forward(args);
  const auto values =
      static_cast<size_t>(args.tokens) * static_cast<size_t>(groups_.front().experts->shape().hidden);
  auto* const sum = static_cast<float*>(args.output);
  std::fill_n(sum, values, 0.0f);
  scratch.resize(values);
  std::vector<int32_t> ids(static_cast<size_t>(args.tokens) * static_cast<size_t>(args.top_k));
  const int32_t* const given = args.ids;
  args.output = scratch.data();
  for (const Group& group : groups_) {
    for (size_t i = 0; i < ids.size(); ++i)
      ids[i] = given[i] < 0 || given[i] >= std::ssize(group.number)
                   ? -1
                   : group.number[static_cast<size_t>(given[i])];
    args.ids = ids.data();
    group.experts->forward(args);
    for (size_t i = 0; i < values; ++i) sum[i] += scratch[i];
  }
}

}  // namespace kt::inline engine
