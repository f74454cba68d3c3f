// One connection of a plane: what comes, what passes to Python, what leaves.
#pragma once

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "slices.hpp"
#include "wire.hpp"

namespace foreprop {

// Why a connection ended, for who reads it.
struct End {
    enum Kind : int { open = 0, closed = 1, broken = 2, refused = 3, apart = 4, failed = 5 };
    Kind kind = open;
    int number = 0;  // broken: the system's; failed: who is blamed, or -1
    Step step = 0;   // failed
    std::string text;
};

enum Role : int { worker, server };

struct Outgoing {
    Frame frame{};
    std::uint8_t header[header_bytes];
    const std::uint8_t* payload = nullptr;
    std::size_t size = 0;
    std::size_t header_size = header_bytes;  // 0: all of it is in the payload
    Buffer held{};
    bool told = false;  // the machine knows that it has left
    std::shared_ptr<bool> ticket{};
    std::int64_t queued_ns = 0, started_ns = 0;
};

struct Connection : std::enable_shared_from_this<Connection> {
    using Id = std::uint64_t;
    // Gives the memory for a frame of its slices; null: it passes.
    using RoomFor =
        std::function<std::uint8_t*(Connection&, const Header&, const std::uint8_t* raw)>;

    Connection(Id number, Role of, int own, int descriptor, const PlaneSetting& setting,
               RoomFor room_for)
        : id(number),
          role(of),
          index(own),
          fd(descriptor),
          reader([room_for = std::move(room_for), this](
                     const Header& h, const std::uint8_t* raw) { return room_for(*this, h, raw); },
                 setting.known, setting.checked,
                 [this](const std::uint8_t* data, std::size_t size, std::size_t left) {
                     pass(data, size, left);
                 }),
          buffer(buffer_bytes) {}
    ~Connection() { close(fd); }

    // Bytes of a frame, of which so many are still to come.
    void pass(const std::uint8_t* data, std::size_t size, std::size_t left) {
        {
            std::lock_guard lock(mutex);
            passed.insert(passed.end(), data, data + size);
            is_partial = left > 0;
            if (!left) {
                passed.insert(passed.end(), inserted.begin(), inserted.end());
                inserted.clear();
            }
            is_full = is_full || passed.size() >= most_passed_bytes;
        }
        changed.notify_all();
    }
    // A whole frame that has not come here, between two that have. Any thread.
    void insert(const std::uint8_t* data, std::size_t size) {
        {
            std::lock_guard lock(mutex);
            auto& to = is_partial ? inserted : passed;
            to.insert(to.end(), data, data + size);
        }
        changed.notify_all();
    }

    const Id id;
    const Role role;
    const int index;  // of this process's server that it is at
    const int fd;
    std::atomic<int> peer = -1;
    std::atomic<bool> carries = false;
    std::atomic<bool> is_paced = false;

    // What passes, and how it ended.
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::uint8_t> passed;
    bool is_full = false, is_partial = false;
    bool listens = false;  // somebody waits for what passes
    std::deque<std::uint8_t> inserted;  // behind a frame that is still coming
    End end;
    std::atomic<int> send_error = 0;

    static constexpr std::size_t buffer_bytes = 65'536;
    static constexpr std::size_t most_passed_bytes = 1 << 20;  // then Python has to read first

    // The receiving thread's.
    FrameReader reader;
    std::vector<std::uint8_t> buffer;
    std::size_t begin = 0, stop = 0;            // of what the buffer has
    int damaged = 0;                            // frames that it was asked for again
    std::map<int, std::optional<Frame>> asked;  // by slice, each with the pull behind it
    std::int64_t began_ns = 0;                  // when the last header of a slice's was here
    Buffer room;                                // of a gradient that comes: nobody else has it yet
    std::int64_t here_ns = 0;  // when what came has passed an emulated link; 0: it has
    std::size_t came = 0;      // how much that is

    // The sending thread's.
    std::deque<Outgoing> out;
    std::size_t sent = 0;         // bytes of the first one
    bool waits = false;           // for room in the kernel, or an emulated link
    bool armed = false;           // and is told of room
    bool owes_word = false;       // something has left, and may count only when there is room
    std::size_t cleared = 0;      // bytes that may leave, of an emulated link
    std::int64_t cleared_ns = 0;  // from then on; 0: now
    std::atomic<bool> waits_for_room = false;
    std::unique_ptr<SendBound> bound;
};
using Shared = std::shared_ptr<Connection>;

}  // namespace foreprop
