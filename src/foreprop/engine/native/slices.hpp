// What a session has: slices and where they lie; and memory that frames leave from.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "codecs.hpp"
#include "lanes.hpp"

namespace foreprop {

struct Piece {
    int parameter;
    int server;
    std::size_t start_bytes;  // in its parameter
    std::size_t whole_bytes;  // and how many there
    std::size_t size_bytes;   // on the wire
    Dtype dtype;              // there; half precision of a parameter in float32 is cast
    bool mean;
    Codec codec;
    std::vector<std::pair<std::size_t, std::size_t>>
        places;  // of its parameters: bytes from and to

    bool is_cast() const { return whole_bytes != size_bytes; }
    std::size_t elems() const { return size_bytes / itemsize(dtype); }
    // On the wire, but for what is not finite and goes as it is.
    std::size_t usual_bytes() const {
        return codec == Codec::none ? size_bytes : code_bytes(codec, elems());
    }
    // A cast is the codec of its type.
    Codec cast() const { return dtype == Dtype::bfloat16 ? Codec::bf16 : Codec::fp16; }
    void narrow(const std::uint8_t* from, std::uint8_t* to) const {
        encode(cast(), reinterpret_cast<const float*>(from), nullptr, elems(), to);
    }
    void widen(const std::uint8_t* from, std::uint8_t* to) const {
        decode(cast(), from, elems(), reinterpret_cast<float*>(to));
    }
};

// A push whose gradient a device still copies: it is there once the word has reached the number.
struct Copying {
    int parameter;
    Step step;
    Flags flags;
    std::int64_t* word;
    std::int64_t number;
    bool pulls = false;  // its averages are due

    // Whoever sees the number sees the gradient, too.
    bool is_over() const {
        return std::atomic_ref(*word).load(std::memory_order_acquire) >= number;
    }
};

struct PlaneSetting {
    int rank;
    int workers;
    int started;   // so many of them are here at the start
    bool elastic;  // others may come, and any may be lost, with the servers in its process
    int parameters;
    std::vector<std::string> names;
    std::vector<Piece> slices;
    Order order;
    Reply reply;
    Turns turns;  // of the worker
    std::vector<std::vector<int>> packs;
    std::vector<std::int64_t> window_sizes_bytes;
    std::int64_t window_bytes;
    int window_servers;
    std::vector<std::pair<int, Turns>> servers;  // that are in this process, with their turns
    std::uint64_t known;                         // kinds of frames, as bits
    bool checked;                                // frames carry checksums
    bool checks_finite;                          // of all ranks' gradients
    std::size_t unsent_bytes;                    // that the kernel may hold of a connection
};

// Memory that several frames may be sent from; it goes back when the last one has left.
using Buffer = std::shared_ptr<std::vector<std::uint8_t>>;

class Buffers {
  public:
    ~Buffers() {
        for (auto& [_, pool] : free_)
            for (auto* each : pool) delete each;
    }
    Buffer take(std::size_t size) {
        std::vector<std::uint8_t>* found = nullptr;
        {
            std::lock_guard lock(mutex_);
            if (auto& pool = free_[size]; !pool.empty()) {
                found = pool.back();
                pool.pop_back();
            }
        }
        if (!found) found = new std::vector<std::uint8_t>(size);
        return {found, [this](std::vector<std::uint8_t>* done) {
                    std::lock_guard lock(mutex_);
                    free_[done->size()].push_back(done);
                }};
    }

  private:
    std::mutex mutex_;
    std::map<std::size_t, std::vector<std::vector<std::uint8_t>*>> free_;
};

}  // namespace foreprop
