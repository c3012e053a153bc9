-- Forgets what ended longer than retain_s ago, at most 500 tombstones a step. ARGV: retain_s. Reply: ok {purged}.
if not read_job() then return reply('missing') end
expire_batches(seconds())
local old = call('ZRANGEBYSCORE', ENDED, '-inf', seconds() - tonumber(ARGV[1]), 'LIMIT', 0, 500)
for _, item in ipairs(old) do
  local kind, id = string.sub(item, 1, 1), string.sub(item, 3)
  if kind == 'g' then
    local g = load(GROUPS, id)
    for i = 0, g and member_count(g) - 1 or -1 do
      call('HDEL', ROLLOUTS, member(id, i))
      call('HDEL', SAMPLED, member(id, i)) -- from a gateway that kept no books
    end
    call('HDEL', GROUPS, id)
    call('ZREM', ORDER, id)
  elseif kind == 'b' then
    local b = load(BATCHES, id)
    if b and call('HGET', REQUESTS, b.request_key) == id then call('HDEL', REQUESTS, b.request_key) end
    call('HDEL', BATCHES, id)
  else
    call('HDEL', REQUESTS, id)
  end
  call('ZREM', ENDED, item)
end
return reply('ok', { purged = #old })
