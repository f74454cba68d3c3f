// `engine.pacing.Link`: one direction of a node's emulated interface, which its processes share.
#pragma once

#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "frames.hpp"

namespace foreprop {

inline std::int64_t now_ns() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

// The file begins with the moment at which the link is free, in seconds.
class Link {
  public:
    static constexpr std::size_t chunk_bytes = 32 * 1024;  // that pass it together

    Link(int file, double seconds_per_byte)
        : file_(dup(file)), seconds_per_byte_(seconds_per_byte) {
        void* at = mmap(nullptr, sizeof(double), PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
        if (at == MAP_FAILED)
            throw ProtocolError(ProtocolError::internal, "an emulated link cannot be mapped");
        free_at_s_ = static_cast<double*>(at);
    }
    Link(const Link&) = delete;
    ~Link() {
        munmap(free_at_s_, sizeof(double));
        close(file_);
    }
    int descriptor() const { return file_; }

    // When so many bytes will have passed it, behind all that came before them.
    std::int64_t occupy(std::size_t bytes) {
        flock(file_, LOCK_EX);
        const double now_s = static_cast<double>(now_ns()) / 1e9;
        const double begin_s = std::max(*free_at_s_, now_s - slack_s);
        const double done_s = begin_s + static_cast<double>(bytes) * seconds_per_byte_;
        *free_at_s_ = done_s;
        flock(file_, LOCK_UN);
        return static_cast<std::int64_t>(done_s * 1e9);
    }

  private:
    static constexpr double slack_s = 0.002;  // makes up for sleeps that end late
    int file_;
    double seconds_per_byte_;
    double* free_at_s_;
};

}  // namespace foreprop
