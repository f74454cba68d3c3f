// What happened to slices, and when: for traces, and for who knows ranks by their lateness.
#pragma once

#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

#include "pacing.hpp"

namespace foreprop {

// `core.frames.Stage`, from `push_queued` on: what is known of a slice here.
enum class Stage : int {
    push_queued = 1,
    push_sent,
    push_received,
    updated,
    reply_queued,
    reply_sent,
    reply_received,
    parameter_ready,
};

// A stage of a slice; of a parameter that is ready, its number is in the slice's place.
struct Span {
    Stage stage;
    int slice;
    Step step;
    int priority;
    int peer;  // -1: none
    std::size_t bytes;
    std::int64_t start_ns, stop_ns;
};

// Spans of one worker or server, for who has asked for them.
class Spans {
  public:
    bool noted() const { return noted_; }
    // The time, if somebody has asked for it.
    std::int64_t now() const { return noted_ ? now_ns() : 0; }
    void note(Span span) {
        if (!noted_) return;
        if (!span.stop_ns) span.stop_ns = now_ns();  // asked for meanwhile
        if (!span.start_ns) span.start_ns = span.stop_ns;
        std::lock_guard lock(mutex_);
        if (spans_.size() < most) {
            spans_.push_back(span);
        } else {
            ++lost_;
        }
    }
    // Those since the last time, and how many more there were; they are noted from the first on.
    std::pair<std::vector<Span>, int> take() {
        std::lock_guard lock(mutex_);
        noted_ = true;
        return {std::exchange(spans_, {}), std::exchange(lost_, 0)};
    }

  private:
    static constexpr std::size_t most = 1 << 18;  // whoever takes them has gone
    std::atomic<bool> noted_ = false;
    std::mutex mutex_;
    std::vector<Span> spans_;
    int lost_ = 0;
};

}  // namespace foreprop
