// ExpertLayer: one layer's experts, with tensors as addresses.
#include "hybrid/expert_layer.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "base/error.h"
#include "bindings/bindings.h"
#include "bindings/cpu_infer.h"

namespace kt::python {
namespace {

template <typename T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

Real real_of(int type) {
  if (type < 0 || type > static_cast<int>(Real::kF16))
    fail("element type {}: expected 0 (f32), 1 (bf16) or 2 (f16)", type);
  return static_cast<Real>(type);
}

class Layer {
 public:
  Layer(const CpuInfer& infer, ExpertLayerOptions options)
      : layer_(std::make_unique<ExpertLayer>(infer.team(), std::move(options))) {}
  // After its work in flight. In a forked child there is nobody to finish it: then it is left alone.
  ~Layer() {
    if (!maker_.is_this_process())
      layer_.release();
    else
      without_gil([this] { layer_.reset(); });
  }

  ExpertLayer& get() const {
    maker_.check("wrapper");
    return *layer_;
  }

  // The layer reads the mask until its end, so its owner lives longer.
  void set_mask(uintptr_t mask, nb::object owner) {
    get().set_mask(at<const uint8_t>(mask));
    mask_owner_ = std::move(owner);
  }

 private:
  Maker maker_;
  nb::object mask_owner_;
  std::unique_ptr<ExpertLayer> layer_;
};

// (tokens, input, type, stride, ids, 64-bit ids, weights)
LayerCall call_of(const ExpertLayer& layer, int tokens, uintptr_t input, int type, int64_t stride,
                  uintptr_t ids, bool wide, uintptr_t weights) {
  return {.tokens = tokens,
          .top_k = layer.options().top_k,
          .input = at<const void>(input),
          .input_type = real_of(type),
          .input_stride = stride,
          .ids = at<const void>(ids),
          .ids_are_64_bit = wide,
          .weights = at<const float>(weights)};
}

void forward(const Layer& self, int tokens, uintptr_t input, int type, int64_t stride, uintptr_t ids,
             bool wide, uintptr_t weights, uintptr_t output) {
  ExpertLayer& layer = self.get();
  const LayerCall call = call_of(layer, tokens, input, type, stride, ids, wide, weights);
  without_gil([&] { layer.forward(call, at<void>(output)); });
}

// (rank, scale, A, B) of gate and up, then of down.
using LoraTuple = std::tuple<int, float, uintptr_t, uintptr_t, int, float, uintptr_t, uintptr_t>;
ExpertLora lora_of(const std::optional<LoraTuple>& given) {
  if (!given) return {};
  const auto& [rank1, scale1, a1, b1, rank2, scale2, a2, b2] = *given;
  return {.gate_up = {rank1, scale1, at<const float>(a1), at<const float>(b1)},
          .down = {rank2, scale2, at<const float>(a2), at<const float>(b2)}};
}

std::unique_ptr<SavedCall> train_forward(const Layer& self, int tokens, uintptr_t input, int type,
                                         int64_t stride, uintptr_t ids, bool wide, uintptr_t weights,
                                         uintptr_t output, const std::optional<LoraTuple>& lora, bool keep) {
  ExpertLayer& layer = self.get();
  const LayerCall call = call_of(layer, tokens, input, type, stride, ids, wide, weights);
  auto saved = keep ? std::make_unique<SavedCall>() : nullptr;
  without_gil([&] { layer.train_forward(call, at<void>(output), lora_of(lora), saved.get()); });
  return saved;
}

using LoraGrads = std::tuple<uintptr_t, uintptr_t, uintptr_t, uintptr_t>;

void train_backward(const Layer& self, const SavedCall* saved, int tokens, uintptr_t input, int type,
                    int64_t stride, uintptr_t ids, bool wide, uintptr_t weights, uintptr_t output_grad,
                    int grad_type, const std::optional<LoraTuple>& lora, uintptr_t input_grad,
                    uintptr_t weights_grad, const std::optional<LoraGrads>& lora_grads) {
  ExpertLayer& layer = self.get();
  const LayerCall call = call_of(layer, tokens, input, type, stride, ids, wide, weights);
  LayerBackward back{.saved = saved,
                     .output_grad = at<const void>(output_grad),
                     .output_grad_type = real_of(grad_type),
                     .input_grad = at<float>(input_grad),
                     .weights_grad = at<float>(weights_grad)};
  if (lora_grads) {
    const auto& [a1, b1, a2, b2] = *lora_grads;
    back.lora_grads = {at<float>(a1), at<float>(b1), at<float>(a2), at<float>(b2)};
  }
  without_gil([&] { layer.train_backward(call, lora_of(lora), back); });
}

// As tasks of kt_kernel_ext.moe ask for it: the number of tokens stands in memory until the task runs, ids
// have 64 bits, rows have no gaps.
void forward_at(const Layer& self, uintptr_t tokens, int top_k, uintptr_t ids, uintptr_t weights,
                uintptr_t input, int type, uintptr_t output, bool adds) {
  ExpertLayer& layer = self.get();
  if (!tokens) fail("layer {}: a null address for the number of tokens", layer.options().layer);
  LayerCall call = call_of(layer, *at<const int32_t>(tokens), input, type, 0, ids, true, weights);
  call.top_k = top_k;
  call.adds = adds;
  without_gil([&] { layer.forward(call, at<void>(output)); });
}

using Addresses = std::vector<uintptr_t>;

// Each list is gate, up, down.
void load_codes(const Layer& self, const std::vector<Addresses>& codes, const std::vector<Addresses>& scales,
                const std::vector<uint32_t>& gguf_types, const std::vector<int64_t>& map) {
  if (codes.size() != 3 || scales.size() != 3 || gguf_types.size() != 3)
    fail("codes, scales and types of {}, {} and {} projections: expected 3 of each", codes.size(),
         scales.size(), gguf_types.size());
  const auto pointers = [](const Addresses& addresses) {
    std::vector<const void*> out;
    for (const uintptr_t address : addresses) out.push_back(at<const void>(address));
    return out;
  };
  const auto side = [&](size_t i) {
    return ExpertCodes::Side{
        .codes = pointers(codes[i]), .scales = pointers(scales[i]), .gguf_type = gguf_types[i]};
  };
  ExpertLayer& layer = self.get();
  adopt_log_level();
  without_gil([&] { layer.load_codes({.gate = side(0), .up = side(1), .down = side(2)}, map); });
}

uint64_t submit(const Layer& self, int tokens, uintptr_t input, int type, int64_t stride, uintptr_t ids,
                bool wide, uintptr_t weights, uintptr_t stream) {
  ExpertLayer& layer = self.get();
  const LayerCall call = call_of(layer, tokens, input, type, stride, ids, wide, weights);
  return without_gil([&] {
    layer.submit(call, at<CudaStreamTag>(stream));
    const CudaDriver* driver = cuda_driver();
    return driver ? driver->capture(at<CudaStreamTag>(stream)) : 0;
  });
}

void submit_write(const Layer& self, int expert, const std::vector<uintptr_t>& w13,
                  const std::vector<uintptr_t>& w13_scale, const std::vector<uintptr_t>& w2,
                  const std::vector<uintptr_t>& w2_scale) {
  std::vector<ExpertBuffers> ranks(w13.size());
  for (const auto* list : {&w13_scale, &w2, &w2_scale})
    if (list->size() != ranks.size())
      fail("buffers of {} and {} ranks: expected one address for each rank in every list", ranks.size(),
           list->size());
  for (size_t i = 0; i < ranks.size(); ++i)
    ranks[i] = {at<void>(w13[i]), at<void>(w13_scale[i]), at<void>(w2[i]), at<void>(w2_scale[i])};
  ExpertLayer& layer = self.get();
  without_gil([&] { layer.submit_write(expert, ranks); });
}

void make(Layer* self, const CpuInfer& infer, nb::kwargs given) {
  ExpertLayerOptions options;
  const auto take = [&](const char* name, auto& value) {
    if (!given.contains(name)) return;
    if (!nb::try_cast(given[name], value))
      throw nb::type_error(text("ExpertLayer: {} has a value of a wrong type", name).c_str());
  };
  std::string activations = "default";
  take("layer", options.layer);
  take("experts", options.shape.experts);
  take("hidden", options.shape.hidden);
  take("inter", options.shape.inter);
  take("top_k", options.top_k);
  take("method", options.method);
  take("weights", options.weights);
  take("model", options.model);
  take("max_tokens", options.max_tokens);
  take("max_deferred", options.max_deferred);
  take("group_size", options.group_size);
  take("zero_point", options.zero_point);
  take("save", options.save);
  take("swiglu_limit", options.activation.limit);
  take("swiglu_alpha", options.activation.alpha);
  take("activations", activations);
  options.precision = precision_named(activations);
  adopt_log_level();
  without_gil([&] { new (self) Layer(infer, std::move(options)); });
}

}  // namespace

void add_expert_layer(nb::module_& module) {
  nb::class_<SavedCall>(module, "SavedCall", "What a training forward keeps until its backward.")
      .def_prop_ro("bytes", &SavedCall::bytes);
  nb::class_<Layer>(module, "ExpertLayer", "The routed experts of one layer. Addresses are trusted.")
      .def("__init__", &make, nb::arg("cpu_infer"), nb::arg("options"))
      .def(
          "load",
          [](const Layer& self, const std::vector<int64_t>& map) {
            ExpertLayer& layer = self.get();
            adopt_log_level();
            without_gil([&] { layer.load(map); });
          },
          nb::arg("physical_to_logical"), "Reads the weights under the path of the options.")
      .def(
          "load_values",
          [](const Layer& self, uintptr_t gate, uintptr_t up, uintptr_t down, int type,
             const std::vector<int64_t>& map) {
            ExpertLayer& layer = self.get();
            adopt_log_level();
            const ExpertValues values = {at<const void>(gate), at<const void>(up), at<const void>(down),
                                         real_of(type)};
            without_gil([&] { layer.load_values(values, map); });
          },
          nb::arg("gate"), nb::arg("up"), nb::arg("down"), nb::arg("type"), nb::arg("physical_to_logical"),
          "Quantises values at host addresses; type 0 is f32, 1 bf16, 2 f16.")
      .def(
          "load_codes", &load_codes, nb::arg("codes"), nb::arg("scales"), nb::arg("gguf_types"),
          nb::arg("physical_to_logical"),
          "Weights as checkpoints of the method store them, at host addresses: one for each expert, in lists "
          "for gate, up and down.")
      .def_prop_ro("loaded", [](const Layer& self) { return self.get().loaded(); })
      .def("set_mask", &Layer::set_mask, nb::arg("mask"), nb::arg("owner").none(),
           "Address of [experts] bytes that `owner` keeps, read by each forward; 0: the CPU has all.")
      .def("forward", &forward, nb::arg("tokens"), nb::arg("input"), nb::arg("type"), nb::arg("stride"),
           nb::arg("ids"), nb::arg("wide_ids"), nb::arg("weights"), nb::arg("output"),
           "At once, on host memory.")
      .def("forward_at", &forward_at, nb::arg("tokens"), nb::arg("top_k"), nb::arg("ids"), nb::arg("weights"),
           nb::arg("input"), nb::arg("type"), nb::arg("output"), nb::arg("adds"),
           "The same with the number of tokens, an int32, at an address, and 64-bit ids; `adds` to what the "
           "output holds.")
      .def("train_forward", &train_forward, nb::arg("tokens"), nb::arg("input"), nb::arg("type"),
           nb::arg("stride"), nb::arg("ids"), nb::arg("wide_ids"), nb::arg("weights"), nb::arg("output"),
           nb::arg("lora").none(), nb::arg("keep"),
           "At once, on host memory, with low-rank factors beside the weights: None, or (rank, scale, A, B) "
           "of "
           "gate and up and of down in one tuple. With `keep` the result is what train_backward() takes.")
      .def(
          "train_backward", &train_backward, nb::arg("saved").none(), nb::arg("tokens"), nb::arg("input"),
          nb::arg("type"), nb::arg("stride"), nb::arg("ids"), nb::arg("wide_ids"), nb::arg("weights"),
          nb::arg("output_grad"), nb::arg("grad_type"), nb::arg("lora").none(), nb::arg("input_grad"),
          nb::arg("weights_grad"), nb::arg("lora_grads").none(),
          "Gradients of the input and of routing weights are f32 and overwritten, those of factors (None, or "
          "four addresses) added to; 0 is an address of what is not wanted.")
      .def("submit", &submit, nb::arg("tokens"), nb::arg("input"), nb::arg("type"), nb::arg("stride"),
           nb::arg("ids"), nb::arg("wide_ids"), nb::arg("weights"), nb::arg("stream"),
           "In the order of a CUDA stream; the number of the capture that the stream is in, or 0.")
      .def(
          "sync",
          [](const Layer& self, uintptr_t output, int tokens, uintptr_t stream) {
            ExpertLayer& layer = self.get();
            without_gil([&] { layer.sync(at<void>(output), tokens, at<CudaStreamTag>(stream)); });
          },
          nb::arg("output"), nb::arg("tokens"), nb::arg("stream"),
          "Makes the stream wait and copy the result.")
      .def(
          "check",
          [](const Layer& self) {
            ExpertLayer& layer = self.get();
            without_gil([&] { layer.check(); });
          },
          "Raises the first error of work in flight.")
      .def("submit_write", &submit_write, nb::arg("expert"), nb::arg("w13"), nb::arg("w13_scale"),
           nb::arg("w2"), nb::arg("w2_scale"),
           "Weights of a slot into host buffers, one address per rank in each list.")
      .def(
          "sync_write",
          [](const Layer& self) {
            ExpertLayer& layer = self.get();
            without_gil([&] { layer.sync_write(); });
          },
          "Until what this layer was asked to write is written; raises what failed of it.")
      .def(
          "write_bytes",
          [](const Layer& self, int ranks) {
            const ExpertLayer& layer = self.get();
            return std::tuple(layer.w13_bytes(ranks), layer.w13_scale_bytes(ranks), layer.w2_bytes(ranks),
                              layer.w2_scale_bytes(ranks));
          },
          nb::arg("ranks"), "Bytes of w13, w13 scale, w2 and w2 scale of one expert and rank.")
      .def_prop_ro("packed_bytes", [](const Layer& self) {
        const ExpertLayer& layer = self.get();
        return layer.loaded() ? layer.experts().packed_bytes() : 0;
      });
}

}  // namespace kt::python
