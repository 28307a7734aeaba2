#include "weights/lora/adapted_matrix.h"

#include <algorithm>
#include <vector>

#include "base/error.h"

namespace kt::inline weights {
namespace {

class AdaptedMatrix : public StoredMatrix {
 public:
  AdaptedMatrix(std::unique_ptr<StoredMatrix> base, const FactorViews& factors)
      : base_(std::move(base)), factors_(factors) {
    KT_CHECK(factors.b.rows == base_->n && factors.a.columns == base_->k,
             "{}: factors of [{}, {}], not [{}, {}]", base_->name, factors.b.rows, factors.a.columns,
             base_->n, base_->k);
    name = base_->name;
    n = base_->n;
    k = base_->k;
    format = format_named("f32");
    a_.resize(static_cast<size_t>(factors.rank * k));
    read_rows(factors.a, 0, factors.rank, a_.data(), factors.a_name);
  }

  Matrix rows(int64_t first, int64_t count) const override {
    std::vector<float> some(static_cast<size_t>(count * k));
    values(first, count, some.data());
    return quantise(format, some, count, k);
  }

  void values(int64_t first, int64_t count, float* out) const override {
    base_->values(first, count, out);
    const auto width = static_cast<size_t>(k), rank = static_cast<size_t>(factors_.rank);
    std::vector<float> b(rank), added(width);
    for (int64_t row = first; row < first + count; ++row, out += k) {
      read_rows(factors_.b, row, 1, b.data(), factors_.b_name);
      std::ranges::fill(added, 0.0f);
      for (size_t r = 0; r < rank; ++r) {
        const float* const a = a_.data() + r * width;
        const float by = b[r];
        for (size_t c = 0; c < width; ++c) added[c] += by * a[c];
      }
      for (size_t c = 0; c < width; ++c) out[c] += factors_.scale * added[c];
    }
  }

  int64_t rows_at_once() const override { return base_->rows_at_once(); }
  void read_ahead() const override { base_->read_ahead(); }
  uint64_t held_bytes() const override { return base_->held_bytes() + a_.size() * sizeof(float); }

 private:
  std::unique_ptr<StoredMatrix> base_;
  FactorViews factors_;
  std::vector<float> a_;  // [rank, k]
};

}  // namespace

std::unique_ptr<StoredMatrix> adapted(std::unique_ptr<StoredMatrix> base, const FactorViews& factors) {
  return std::make_unique<AdaptedMatrix>(std::move(base), factors);
}

}  // namespace kt::inline weights
