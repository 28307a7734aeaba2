// kt_kernel.kt_kernel_ext: the C++ side of the package. Tensors cross as addresses; python/kt_kernel checks
// what they point to.
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <tuple>
#include <vector>

#include "bindings/bindings.h"
#include "cuda/driver.h"
#include "hybrid/expert_layer.h"
#include "hybrid/shared_experts.h"
#include "kernels/isas.h"
#include "kt_version.h"
#include "weights/weight_method.h"

namespace kt::python {
namespace {

std::vector<std::string> methods() {
  std::vector<std::string> names;
  for (const WeightMethod& method : weight_methods()) names.emplace_back(method.name);
  return names;
}

std::string method_named(const std::string& name) { return std::string(weight_method_named(name).name); }

std::string stored_method_under(const std::string& path) {
  return without_gil([&] { return std::string(stored_method(*shared_experts(path)).name); });
}

bool loads(const std::string& method, const std::string& path) {
  return without_gil([&] {
    const auto source = shared_experts(path);
    return loads_method(weight_method_named(method), *source, source->layers().front());
  });
}

// (name, the feature this CPU lacks for it or "") of every instruction set of this build, worst first.
std::vector<std::tuple<std::string, std::string>> all_isas() {
  std::vector<std::tuple<std::string, std::string>> out;
  for (const IsaStatus& isa : isas()) out.emplace_back(isa.table->name, isa.missing ? isa.missing : "");
  return out;
}

}  // namespace
}  // namespace kt::python

NB_MODULE(kt_kernel_ext, module) {
  namespace nb = nanobind;
  using namespace kt::python;
  module.doc() = "Experts of Mixture-of-Experts layers on CPUs: the C++ side of kt_kernel.";
  module.attr("__version__") = KT_VERSION;
  add_errors(module);
  add_logging(module);
  add_cpu_infer(module);
  add_expert_layer(module);
  add_rules(module);
  add_checkpoint(module);
  add_linear_layer(module);
  module.def("methods", &methods, "Names of the weight formats that ExpertLayer takes.");
  module.def("method_named", &method_named,
             "The name among methods() that a name, short or long and in any case, stands for. ValueError "
             "listing them.");
  module.def(
      "stored_method", &stored_method_under,
      "The method that loads the experts under a path as they are stored: a checkpoint's folder, GGUF, "
      "kt weights.");
  module.def(
      "loads", &loads,
      "Whether ExpertLayer.load takes the experts under a path for this method, as they are or rounded "
      "while they are read.");
  module.def("isas", &all_isas,
             "(name, missing feature or '') of each instruction set of this build, worst first.");
  module.def(
      "isa", [] { return std::string(kt::best_kernels().name); },
      "The instruction set in use. ValueError or NotImplementedError where KT_ISA or KT_KERNEL_CPU_VARIANT "
      "names "
      "one that is not known or not here.");
  module.def(
      "cuda_prepare",
      [] {
        return kt::python::without_gil([] {
          const kt::CudaDriver* const driver = kt::cuda_driver();
          return driver && driver->posts();
        });
      },
      "Loads what calls in streams of the current device need: without it the first of them does, and may "
      "wait for the "
      "device. Whether calls are posted to the CPU by the GPU itself.");
  module.def("cuda_status", &kt::cuda_driver_status,
             "One line: the CUDA driver and its devices, or why there is none. The first call looks.");
  module.def(
      "has_cuda", [] { return kt::cuda_driver() != nullptr; },
      "Whether streams can be given. The first call looks.");
  module.def(
      "release_buffers", [] { return without_gil([] { return kt::release_buffers(); }); },
      "Gives back the buffers of streams, when no work is in flight, and of captured graphs that are gone. "
      "The numbers "
      "of the captures that keep theirs.");
  module.def(
      "buffer_bytes", [] { return without_gil([] { return kt::held_buffer_bytes(); }); },
      "Bytes of page-locked memory that streams and captured graphs have.");
  // Parts that are Python's own (moe), and words for those that are not here: kt_kernel/ext_parts.py. Last,
  // because a def asks for the name's value first.
  module.attr("__path__") = nb::list();
  module.def("__getattr__", [](const std::string& name) {
    return nb::module_::import_("kt_kernel.ext_parts").attr("part")(name);
  });
}
