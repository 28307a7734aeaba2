// Which layers are of one model: what one of them defers is for the next of the same.
//
// Engines make layers without saying of which model. A layer is of the model whose layer was made last under
// the same path and with the same hidden size; when that model has a living layer of this number already, it
// is the first of another model. So models whose layers are made one model after the other are told apart,
// in whatever order they are called later. Where that does not hold (layers of two models made by turns), a
// name says it.
#pragma once
#include <cstdint>
#include <string>

namespace kt::inline hybrid {

// A layer's place in its model, from its making on. Any thread.
class LayerSlot {
 public:
  // With a name, all layers of that name are of one model, whatever their path.
  LayerSlot(const std::string& name, const std::string& path, int hidden, int layer);
  ~LayerSlot() { leave(); }
  LayerSlot(const LayerSlot&) = delete;
  LayerSlot& operator=(const LayerSlot&) = delete;

  void leave() noexcept;                     // the layer ended: another one may take its number in the model
  uint64_t model() const { return model_; }  // no other model of this process has it

 private:
  std::string key_;
  int layer_;
  uint64_t model_ = 0;
  bool held_ = true;
};

}  // namespace kt::inline hybrid
