// Copies that are asked for now and are over later, in their order, as a GPU's to the host are.
// `staged.py` compiles it: the thread that copies must not need the interpreter.
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>

namespace {

struct Copy {
    void* to;
    const void* from;
    std::size_t size;
};

class Copier {
  public:
    Copier() : thread_([this] { run(); }) {}
    ~Copier() {
        {
            std::lock_guard lock(mutex_);
            stops_ = true;
        }
        asked_.notify_one();
        thread_.join();
    }
    void ask(Copy copy) {
        {
            std::lock_guard lock(mutex_);
            copies_.push_back(copy);
        }
        asked_.notify_one();
    }
    void wait(std::int64_t number) {
        std::unique_lock lock(mutex_);
        over_.wait(lock, [&] { return word_ >= number; });
    }
    std::int64_t* word() { return &word_; }

  private:
    void run() {
        std::unique_lock lock(mutex_);
        while (true) {
            asked_.wait(lock, [&] { return stops_ || !copies_.empty(); });
            if (copies_.empty()) return;
            const Copy copy = copies_.front();
            copies_.pop_front();
            lock.unlock();
            std::memcpy(copy.to, copy.from, copy.size);
            lock.lock();
            std::atomic_ref(word_).fetch_add(1, std::memory_order_release);
            over_.notify_all();
        }
    }

    std::mutex mutex_;
    std::condition_variable asked_, over_;
    std::deque<Copy> copies_;
    alignas(8) std::int64_t word_ = 0;  // how many copies are over
    bool stops_ = false;
    std::thread thread_;
};

}  // namespace

extern "C" {
void* copier_new() { return new Copier; }
void copier_free(void* copier) { delete static_cast<Copier*>(copier); }
void* copier_word(void* copier) { return static_cast<Copier*>(copier)->word(); }
void copier_ask(void* copier, void* to, const void* from, std::size_t size) {
    static_cast<Copier*>(copier)->ask({to, from, size});
}
void copier_wait(void* copier, std::int64_t number) {
    static_cast<Copier*>(copier)->wait(number);
}
}
