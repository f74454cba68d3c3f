// What crosses the wire in the place of float32, and what is kept of it: `features.compression`.
#pragma once

#include <cmath>
#include <map>
#include <mutex>

#include "frames.hpp"
#include "quantising.hpp"

namespace foreprop {

enum class Codec { none, int8, int4, bf16, fp16 };

inline bool keeps_error(Codec codec) { return codec == Codec::int8 || codec == Codec::int4; }

inline Quantiser quantiser_of(Codec codec) { return Quantiser{codec == Codec::int8 ? 127 : 7}; }

inline std::size_t code_bytes(Codec codec, std::size_t elems) {
    return keeps_error(codec) ? quantiser_of(codec).size(elems) : 2 * elems;
}

// Of finite values; `error` may be null.
inline void encode(Codec codec, const float* values, float* error, std::size_t elems,
                   std::uint8_t* to) {
    if (keeps_error(codec)) {
        quantiser_of(codec).encode(values, error, elems, to);
    } else if (codec == Codec::bf16) {
        sums_detail::narrow(reinterpret_cast<Bfloat16*>(to), values, elems);
    } else {
        sums_detail::narrow(reinterpret_cast<Float16*>(to), values, elems);
    }
}

// Whether these bytes, of the length of a code, are one.
inline bool decode(Codec codec, const std::uint8_t* from, std::size_t elems, float* to) {
    if (keeps_error(codec)) return quantiser_of(codec).decode(from, elems, to);
    if (codec == Codec::bf16) {
        sums_detail::widen(to, reinterpret_cast<const Bfloat16*>(from), elems);
    } else {
        sums_detail::widen(to, reinterpret_cast<const Float16*>(from), elems);
    }
    return true;
}

// The loss's scale by step, as `residuals.Residuals` knows it. Any thread.
class Scales {
  public:
    void announce(Step step, double scale) {
        std::lock_guard lock(mutex_);
        const auto later = by_step_.upper_bound(step - 1);  // the one before holds till then
        if (later != by_step_.begin()) by_step_.erase(by_step_.begin(), std::prev(later));
        by_step_[step] = scale;
    }
    double at(Step step) const {
        std::lock_guard lock(mutex_);
        const auto later = by_step_.upper_bound(step);
        return later == by_step_.begin() ? 1.0 : std::prev(later)->second;
    }

  private:
    mutable std::mutex mutex_;
    std::map<Step, double> by_step_;
};

// `residuals.SliceResidual`: what a slice's codes have left out, with the open round and without.
// Any thread.
class SliceResidual {
  public:
    struct State {
        std::vector<float> kept, tried;  // none before the first round
        double scale = 1.0;              // of the loss, as `kept` has it
        Round open = never;              // the round that may still not count
    };
    // Begins a round; `now` was the loss's scale when the last step was made.
    void follow(Codec codec, std::size_t elems, Round round, double now, bool builds_on) {
        if (!keeps_error(codec)) return;
        std::lock_guard lock(mutex_);
        auto& [kept, tried, scale, open] = state_;
        if (kept.empty()) {
            kept.assign(elems, 0.0f);
            tried.assign(elems, 0.0f);
            scale = now;
        }
        if (open == round) return;  // it is encoded once more
        const Round last = std::exchange(open, never);
        if (last != never && (last.step < round.step || builds_on)) {
            kept.swap(tried);
            // what the round lacked that began before its scale was known
            const auto missing = static_cast<float>(now / scale - 1.0);
            for (std::size_t i = 0; missing != 0.0f && i < kept.size(); ++i)
                kept[i] = std::fma(tried[i], missing, kept[i]);
            scale = now;
        }
        const auto factor = static_cast<float>(now / std::exchange(scale, now));
        for (std::size_t i = 0; factor != 1.0f && i < kept.size(); ++i) kept[i] *= factor;
    }
    // Of a round that has begun, with finite values.
    void encode(Codec codec, Round round, const float* values, std::size_t elems,
                std::uint8_t* to) {
        if (!keeps_error(codec)) return foreprop::encode(codec, values, nullptr, elems, to);
        std::lock_guard lock(mutex_);
        state_.tried = state_.kept;
        state_.open = round;
        foreprop::encode(codec, values, state_.tried.data(), elems, to);
    }
    State get() const {
        std::lock_guard lock(mutex_);
        return state_;
    }
    void put(State state) {
        std::lock_guard lock(mutex_);
        state_ = std::move(state);
    }

  private:
    mutable std::mutex mutex_;
    State state_;
};

}  // namespace foreprop
