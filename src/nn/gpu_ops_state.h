// The class behind make_gpu_ops: what gpu_ops.cc (rows, norms, attention) and gpu_ops_products.cc (linears, routers,
// experts, the head) share. Not for other files.
#pragma once
#include <algorithm>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/checked.h"
#include "nn/gpu_ops.h"
#include "nn/gpu_step.h"
#include "nn/gpu_weights.h"

namespace kt {

inline constexpr int kRowThreads = 256;  // of a block that takes a row

// Rows by name, in one piece of device memory.
class GpuRows {
 public:
  Rows rows(std::string_view name, int64_t width) {
    size_t i = 0;
    while (i < all_.size() && all_[i].name != name) ++i;
    if (i == all_.size()) all_.push_back({.name = std::string(name)});
    all_[i].width = std::max(all_[i].width, width);
    return {.id = static_cast<int>(i), .width = width};
  }
  int64_t floats(int64_t tokens) const {
    int64_t sum = 0;
    for (const Named& named : all_) sum += round_up(named.width * tokens, kAlignment);
    return sum;
  }
  void allocate(std::shared_ptr<const Gpu> gpu, int64_t tokens) {
    memory_ =
        DeviceBuffer(std::move(gpu), static_cast<size_t>(floats(tokens)) * sizeof(float), "rows of a step");
    int64_t at = 0;
    for (Named& named : all_) {
      named.at = at;
      at += round_up(named.width * tokens, kAlignment);
    }
  }
  float* at(Rows rows) const { return memory_.as<float>() + all_[static_cast<size_t>(rows.id)].at; }

 private:
  struct Named {
    std::string name;
    int64_t width = 0, at = 0;  // in floats
  };
  static constexpr int64_t kAlignment = 64;  // in floats
  std::vector<Named> all_;
  DeviceBuffer memory_;
};

class GpuOps final : public Ops {
 public:
  GpuOps(std::shared_ptr<Pool> pool, GpuOpsOptions options);

  Place place() const override { return {.kind = Place::Kind::kGpu, .index = options_.number}; }
  int nodes() const override { return pool_->nodes(); }
  bool sizes_only() const override { return options_.sizes_only; }

  std::unique_ptr<PlacedVector> make_vector(std::vector<float> values) override {
    return std::make_unique<GpuVector>(weights_, values);
  }
  std::unique_ptr<PlacedLinear> make_linear(const RowReader& weights, std::span<const float> bias, Precision,
                                            std::string_view name) override {
    return linear_of_rows(weights, bias, name);
  }
  std::unique_ptr<PlacedLinear> make_linear(const MatrixView& weights, Precision,
                                            std::string_view name) override {
    const Pool& pool = *pool_;
    return std::make_unique<GpuLinear>(weights_, Linear(pool, weights, {}, packed(), name), name);
  }
  std::unique_ptr<PlacedExperts> make_experts(const ExpertsShape& shape, const ExpertsOptions& options,
                                              const ExpertsFill& fill, std::span<const int> hot) override;
  std::unique_ptr<PlacedExperts> make_mlp(const ExpertsShape& shape, const ExpertsOptions& options,
                                          const ExpertsFill& fill) override;
  std::unique_ptr<SequenceCache> make_cache(const SequenceShape& shape, int pages, int slots) override;
  int make_rotation(const RopeSpec& spec) override { return tables_.rotation(spec); }
  Rows rows(std::string_view name, int64_t width) override { return memory_.rows(name, width); }
  void allocate(int max_tokens) override;
  size_t row_bytes(int max_tokens) const override;
  void spread(int64_t n, FunctionRef<void(int64_t)> work) override { host_->spread(n, work); }
  int loading_threads() const override { return host_->loading_threads(); }

  void begin(const StepRows& step) override;
  void end() noexcept override;
  void embed(const RowTable& table, std::span<const int32_t> ids, Rows x, int first) override;
  void norm(Rows x, const PlacedVector& weights, double eps, Rows y) override;
  void add(Rows x, Rows y) override;
  void add_norm(Rows x, Rows y, const PlacedVector& weights, double eps, Rows out) override;
  void linear(std::span<const LinearUse> uses) override;
  void rotate_write(const RotateWrite& args) override;
  void attend(const Attend& args) override;
  void copy_heads(const CopyHeads& args) override;
  std::span<const int32_t> route(const ChooseExperts& args) override;
  void experts(const RunExperts& args) override;
  void mlp(const RunMlp& args) override;
  void sigmoid(Rows x) override;
  void pick(Rows x, std::span<const int> tokens) override;
  void project(const PlacedLinear& weights, Rows x, int count, float* y) override;
  void write(std::span<const float> values, Rows x) override;
  void read(Rows x, std::span<float> values) override;

  StepNeeds measure(const StepRows& step, const SequenceShape& shape, FunctionRef<void()> run) override;
  const Work& work() const override { return work_; }
  const std::vector<StepPart>& parts() const override { return parts_.all(); }

 private:
  // What measure() adds up.
  struct Measured {
    const SequenceShape* shape = nullptr;
    Work work;
    size_t on_host = 0, workspace = 0;
  };
  // A product of the first `rows` rows of x.
  struct Product {
    const GpuLinear& weights;
    const float* x;
    int64_t x_stride;
    float* y;
    int64_t y_stride;
    const float* factors = nullptr;
  };

  LinearOptions packed() const { return {.sizes_only = options_.sizes_only}; }
  std::unique_ptr<GpuLinear> linear_of_rows(const RowReader& weights, std::span<const float> bias,
                                            std::string_view name);
  float* at(Rows rows) const { return memory_.at(rows); }
  float* at(const Columns& columns) const { return at(columns.rows) + columns.first; }
  int32_t* ids_at(Rows rows) const { return reinterpret_cast<int32_t*>(at(rows)); }
  void count(const Place& place, const Amount& amount) {
    (measured_ ? measured_->work : work_).at(place) += amount;
  }
  void multiply(int rows, const Product& product);
  void add_adapter(const LinearUse& use);
  AttendRowsArgs attend_args(const Attend& args) const;
  int groups_of(int heads, int window) const;
  void rotate(const RotateWrite& args, const HeadRows& heads, const float* growth);
  void send_to_experts(Rows x);
  void measure_experts(const RunExperts& args);
  float* scratch(size_t floats);
  void wait();

  const std::shared_ptr<Pool> pool_;
  const GpuOpsOptions options_;
  const std::unique_ptr<Ops> host_;          // loads, and holds routed experts
  const std::unique_ptr<GpuStream> stream_;  // null: sizes only
  const GpuMemory weights_;
  GpuRows memory_;
  GpuStep tables_;
  DeviceBuffer scratch_;                                              // of adapters and logits
  PinnedBuffer embedded_, expert_rows_, expert_out_, ids_, factors_;  // what passes between host and GPU
  int64_t widest_hidden_ = 0;                                         // of experts
  int most_chosen_ = 0;
  Rows sent_;                 // to experts, by the router before them
  std::vector<uint8_t> hit_;  // [experts], scratch
  StepRows step_;
  Measured* measured_ = nullptr;  // while measure() runs
  Work work_;
  StepParts parts_;
  const size_t experts_part_ = parts_.index("experts"), wait_part_ = parts_.index("waiting for the GPU");
};

}  // namespace kt
