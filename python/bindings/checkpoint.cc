// Checkpoint: the tensors of any checkpoint that KT reads, by the names of the model, as numbers.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <tuple>
#include <vector>

#include "bindings/bindings.h"
#include "hybrid/stored_tensors.h"

namespace kt::python {

void add_checkpoint(nb::module_& module) {
  nb::class_<StoredTensors>(
      module, "Checkpoint",
      "The tensors of a folder, a GGUF file or safetensors under the names of the model.")
      .def(
          "__init__",
          [](StoredTensors* self, const std::string& path) {
            without_gil([&] { new (self) StoredTensors(path); });
          },
          nb::arg("path"))
      .def("names", [](const StoredTensors& self) { return without_gil([&] { return self.names(); }); })
      .def(
          "has",
          [](const StoredTensors& self, const std::string& name) {
            return without_gil([&] { return self.has(name); });
          },
          nb::arg("name"))
      .def(
          "describe",
          [](const StoredTensors& self, const std::string& name) {
            const auto found = without_gil([&] { return self.describe(name); });
            return std::tuple(found.shape, found.stored, found.file);
          },
          nb::arg("name"), "(shape, how it is stored, the file that has it)")
      .def(
          "read",
          [](const StoredTensors& self, const std::string& name, uintptr_t out) {
            without_gil([&] { self.values(name, reinterpret_cast<float*>(out)); });
          },
          nb::arg("name"), nb::arg("out"), "Its numbers as float32 to an address with room for its shape.");
}

}  // namespace kt::python
