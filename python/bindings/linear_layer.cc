// LinearLayer: a dense linear on the CPU, with tensors as addresses.
#include "hybrid/linear_layer.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "bindings/bindings.h"
#include "bindings/cpu_infer.h"
#include "formats/known_formats.h"
#include "hybrid/expert_values.h"
#include "hybrid/stored_tensors.h"
#include "weights/requantise.h"

namespace kt::python {
namespace {

class Steps {
 public:
  explicit Steps(const CpuInfer& infer) : steps_(std::make_shared<LinearSteps>(infer.team())) {}
  const std::shared_ptr<LinearSteps>& get() const {
    maker_.check("linear");
    return steps_;
  }

 private:
  Maker maker_;
  std::shared_ptr<LinearSteps> steps_;
};

std::vector<float> bias_at(uintptr_t address, int64_t n) {
  const auto* const values = reinterpret_cast<const float*>(address);
  return values ? std::vector<float>(values, values + n) : std::vector<float>{};
}

// Not "Layer": nanobind knows types by name, and ExpertLayer's is that.
class DenseLayer {
 public:
  // Values at an address: type 0 is f32, 1 bf16, 2 f16.
  DenseLayer(const Steps& steps, const std::string& name, const std::string& format, int64_t n, int64_t k,
             uintptr_t values, int type, uintptr_t bias, const std::string& activations) {
    if (type < 0 || type > static_cast<int>(Real::kF16))
      fail("{}: element type {}: expected 0, 1 or 2", name, type);
    const Format wanted = format_named(format);
    check_shape(wanted, n, k, name);
    pack(
        steps,
        *matrix_of_values(name, wanted, n, k, reinterpret_cast<const void*>(values), static_cast<Real>(type)),
        bias_at(bias, n), activations, name);
  }

  // A module of a checkpoint, by its name; an empty format: as it is stored.
  DenseLayer(const Steps& steps, const std::string& name, const std::string& format,
             const StoredTensors& from, uintptr_t bias, const std::string& activations) {
    without_gil([&] {
      auto matrix = from.matrix(name);
      if (!format.empty() && format_named(format) != matrix->format)
        matrix = requantised(std::move(matrix), format_named(format));
      pack(steps, *matrix, bias_at(bias, matrix->n), activations, name);
    });
  }

  const LinearLayer& get() const {
    maker_.check("linear");
    return *layer_;
  }

 private:
  void pack(const Steps& steps, const StoredMatrix& weights, const std::vector<float>& bias,
            const std::string& activations, const std::string& name) {
    layer_ = std::make_unique<LinearLayer>(steps.get(), weights, bias, precision_named(activations), name);
  }

  Maker maker_;
  std::unique_ptr<LinearLayer> layer_;
};

void forward(const DenseLayer& self, int m, uintptr_t x, int64_t x_stride, uintptr_t y, int64_t y_stride) {
  const LinearLayer& layer = self.get();
  without_gil([&] {
    layer.forward(m, reinterpret_cast<const float*>(x), x_stride, reinterpret_cast<float*>(y), y_stride);
  });
}

}  // namespace

void add_linear_layer(nb::module_& module) {
  nb::class_<Steps>(module, "LinearSteps", "What linears that run on the same workers share.")
      .def(nb::init<const CpuInfer&>(), nb::arg("cpu_infer"));
  nb::class_<DenseLayer>(module, "LinearLayer", "A dense linear, packed. Addresses are trusted.")
      .def(nb::init<const Steps&, const std::string&, const std::string&, int64_t, int64_t, uintptr_t, int,
                    uintptr_t, const std::string&>(),
           nb::arg("steps"), nb::arg("name"), nb::arg("format"), nb::arg("n"), nb::arg("k"),
           nb::arg("values"), nb::arg("type"), nb::arg("bias"), nb::arg("activations"),
           "Values [n, k] at a host address, rounded to the format; type 0 is f32, 1 bf16, 2 f16. bias: an "
           "address of "
           "float32, or 0.")
      .def(nb::init<const Steps&, const std::string&, const std::string&, const StoredTensors&, uintptr_t,
                    const std::string&>(),
           nb::arg("steps"), nb::arg("name"), nb::arg("format"), nb::arg("checkpoint"), nb::arg("bias"),
           nb::arg("activations"), "A module of a checkpoint, by its name; format \"\": as it is stored.")
      .def("forward", &forward, nb::arg("rows"), nb::arg("input"), nb::arg("input_stride"), nb::arg("output"),
           nb::arg("output_stride"), "float32 rows at host addresses, at once.")
      .def_prop_ro("n", [](const DenseLayer& self) { return self.get().linear().n(); })
      .def_prop_ro("k", [](const DenseLayer& self) { return self.get().linear().k(); })
      .def_prop_ro("format",
                   [](const DenseLayer& self) { return std::string(name_of(self.get().linear().format())); })
      .def_prop_ro("packed_bytes", [](const DenseLayer& self) { return self.get().linear().packed_bytes(); });
  module.def(
      "formats",
      [] {
        nb::list out;
        for (const NamedFormat& format : kFormats)
          out.append(nb::str(format.name.data(), format.name.size()));
        return out;
      },
      "Names of the formats that a LinearLayer may have.");
}

}  // namespace kt::python
