// A view of something callable: two words, no allocation, no ownership. For parameters only; the callable
// must outlive every call, so never store one that was made from a temporary.
#pragma once

#include <functional>
#include <memory>
#include <type_traits>
#include <utility>

namespace kt::inline base {

template <typename Signature>
class FunctionRef;

template <typename R, typename... Args>
class FunctionRef<R(Args...)> {
 public:
  template <typename F>
    requires(!std::is_same_v<std::remove_cvref_t<F>, FunctionRef> && std::is_invocable_r_v<R, F&, Args...>)
  FunctionRef(F&& callable) noexcept {
    using Target = std::remove_reference_t<F>;
    if constexpr (std::is_function_v<std::remove_pointer_t<Target>>) {
      target_.function = reinterpret_cast<void (*)()>(&*callable);
      call_ = [](Target_ target, Args... args) -> R {
        using Pointer = std::add_pointer_t<std::remove_pointer_t<Target>>;
        return std::invoke(reinterpret_cast<Pointer>(target.function), std::forward<Args>(args)...);
      };
    } else {
      target_.object = std::addressof(callable);
      call_ = [](Target_ target, Args... args) -> R {
        return std::invoke(*static_cast<Target*>(const_cast<void*>(target.object)),
                           std::forward<Args>(args)...);
      };
    }
  }

  R operator()(Args... args) const { return call_(target_, std::forward<Args>(args)...); }

 private:
  // Erasing the type is this class's one job; the void* never leaves it.
  union Target_ {
    const void* object;
    void (*function)();
  };
  Target_ target_;
  R (*call_)(Target_, Args...);
};

}  // namespace kt::inline base
